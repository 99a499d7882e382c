"""Who takes part: ranks, meshes and meeting places that torch.distributed knows."""
