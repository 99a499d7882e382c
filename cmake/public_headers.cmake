# Headers that users of the installed package may include. The set is closed: none of them includes
# a header that is missing here (tests/structure checks it).
set(HSDP_PUBLIC_HEADERS
  hsdp/bucket_layout.h
  hsdp/comm/communicator.h
  hsdp/comm/control.h
  hsdp/comm/engine.h
  hsdp/comm/rendezvous/launch_environment.h
  hsdp/comm/unique_fd.h
  hsdp/comm/world.h
  hsdp/compare.h
  hsdp/device/buffer.h
  hsdp/device/event.h
  hsdp/device/flag.h
  hsdp/device/stream.h
  hsdp/divide_factors.h
  hsdp/dtype.h
  hsdp/error.h
  hsdp/mesh.h
  hsdp/reducer.h
  hsdp/reducer_options.h
  hsdp/reducer_stats.h
  hsdp/replica_hop.h
  hsdp/row_cut.h
  hsdp/snapshot.h
  hsdp/tensor_view.h
  hsdp/validate.h)
