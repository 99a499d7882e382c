"""hsdp between the replicas of FSDP2 models, and DTensors."""
