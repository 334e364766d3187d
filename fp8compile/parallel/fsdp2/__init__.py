"""Stock FSDP2 (`fully_shard`) that gathers the weights of FP8 layers as codes."""
