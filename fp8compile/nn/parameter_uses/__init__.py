"""Record what a model's forwards do with each parameter, in eager mode and in graphs of Dynamo."""
