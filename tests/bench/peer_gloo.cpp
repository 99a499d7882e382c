// Times reduce-scatter and all-reduce of Gloo over TCP on the loopback device. Ranks meet through
// files in the folder $HSDP_BENCH_STORE; RANK and WORLD_SIZE give this process its rank.
#include <gloo/allreduce.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "measurement.h"

namespace {

using hsdp::bench::ArrayOperation;
using hsdp::bench::Case;
using hsdp::bench::Group;
using hsdp::bench::Op;
using Context = std::shared_ptr<gloo::rendezvous::Context>;

const char* required(const char* variable) {
  const char* value = std::getenv(variable);
  if (value == nullptr) {
    std::fprintf(stderr, "peer_gloo: environment: expected %s, got nothing\n", variable);
    std::exit(2);
  }
  return value;
}

Context connect(int rank, int size) {
  gloo::transport::tcp::attr loopback;
  loopback.iface = "lo";
  auto device = gloo::transport::tcp::CreateDevice(loopback);
  auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
  gloo::rendezvous::FileStore store(required("HSDP_BENCH_STORE"));
  context->connectFullMesh(store, device);
  return context;
}

Group world(const Context& context) {
  Group group{.system = "gloo", .rank = context->rank, .size = context->size};
  group.barrier = [context] {
    gloo::BarrierOptions options(context);
    gloo::barrier(options);
  };
  group.max = [context](double value) {
    gloo::AllreduceOptions options(context);
    double result = 0.0;
    options.setInput(&value, 1);
    options.setOutput(&result, 1);
    options.setReduceFunction([](void* out, const void* a, const void* b, std::size_t) {
      *static_cast<double*>(out) =
          std::max(*static_cast<const double*>(a), *static_cast<const double*>(b));
    });
    gloo::allreduce(options);
    return result;
  };
  return group;
}

void reduce_scatter(const Group& group, const Context& context, const Case& what) {
  const std::int64_t count = what.count();
  const std::int64_t row = count / group.size;
  const auto memory = hsdp::bench::private_memory(what.bytes);
  auto* const data = static_cast<float*>(memory.get());
  const std::vector<int> rows(static_cast<std::size_t>(group.size), static_cast<int>(row));
  gloo::ReduceScatterHalvingDoubling<float> algorithm(context, {data}, static_cast<int>(count),
                                                      rows);
  ArrayOperation operation(group, {memory, data, what.dtype, 0, count},
                           {memory, data, what.dtype, row * group.rank, row},
                           [&] { algorithm.run(); });
  hsdp::bench::measure(group, "halving_doubling", what, operation);
}

// Leaves out Gloo's newer ring, which stalls for hundreds of milliseconds with more ranks than
// cores.
void all_reduce(const Group& group, const Context& context, const Case& what) {
  const auto memory = hsdp::bench::private_memory(what.bytes);
  auto* const data = static_cast<float*>(memory.get());
  const ArrayOperation::Array array{memory, data, what.dtype, 0, what.count()};
  const auto measure = [&](const std::string& variant, const std::function<void()>& run) {
    ArrayOperation operation(group, array, array, run);
    hsdp::bench::measure(group, variant, what, operation);
  };
  const auto count = static_cast<int>(what.count());
  gloo::AllreduceHalvingDoubling<float> halving(context, {data}, count);
  measure("halving_doubling", [&] { halving.run(); });
  gloo::AllreduceRingChunked<float> ring(context, {data}, count);
  measure("ring_chunked", [&] { ring.run(); });
}

}  // namespace

int main(int argc, char** argv) {
  const hsdp::bench::Arguments arguments = hsdp::bench::parse_arguments(argc, argv);
  const int rank = std::atoi(required("RANK"));
  const Context context = connect(rank, std::atoi(required("WORLD_SIZE")));
  hsdp::bench::pin_to_core(rank);  // not Gloo's I/O thread, which is slower when pinned
  const Group group = world(context);
  for (const Case& what : arguments.cases) {
    if (what.dtype != hsdp::Dtype::kF32) continue;
    if (what.op == Op::kReduceScatter) {
      reduce_scatter(group, context, what);
    } else {
      all_reduce(group, context, what);
    }
  }
  group.barrier();
  return 0;
}
