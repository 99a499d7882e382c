"""Who takes part: ranks, meshes and meeting places that torch.distributed knows.

`init_mesh` -> `launched` sets what a launcher would have -> `meet_at_store` where hosts have no address in common,
at a `MeetingStore`; `mesh_from_torch` makes the mesh of a DeviceMesh.
"""
