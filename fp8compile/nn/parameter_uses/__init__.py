"""What a model's forwards do with each parameter, watched while they run in eager mode or are compiled."""
