"""FSDP2 (`fully_shard`) that gathers codes."""
