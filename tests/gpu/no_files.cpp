// Stand-ins for the parts whose libraries a bare machine lacks: snapshots, digests, flight records
// and the rendezvous.
#include "hsdp/comm/rendezvous/host_identity.h"
#include "hsdp/comm/world.h"
#include "hsdp/error.h"
#include "hsdp/reducer/flight_watch.h"
#include "hsdp/snapshot.h"
#include "hsdp/snapshot/digest_log.h"

namespace hsdp {

class SnapshotWriter::Queue {};
SnapshotWriter::SnapshotWriter(MemoryCount /*count*/) {}
SnapshotWriter::~SnapshotWriter() = default;
void SnapshotWriter::submit(const std::filesystem::path& path, const SnapshotInfo& /*info*/,
                            std::span<const SnapshotEntry> /*entries*/,
                            std::span<const SnapshotState> /*hop_state*/) {
  throw SnapshotError("snapshot: cannot write " + path.string() + ": built without files");
}
void SnapshotWriter::flush() {}
std::string new_snapshot_id() { return "none"; }
bool is_snapshot_text(const std::string& /*text*/) { return true; }

DigestWriter::DigestWriter(std::filesystem::path folder, const DigestHeader& /*header*/) {
  throw SnapshotError("digests: cannot write into " + folder.string() + ": built without files");
}
void DigestWriter::append(std::int64_t /*step*/, std::span<const std::uint64_t> /*digests*/) {}

void write_flight_record(const FlightOrigin& /*origin*/, const std::filesystem::path& folder,
                         std::string_view /*reason*/) {
  throw Error("flight record: cannot write into " + folder.string() + ": built without files");
}
std::filesystem::path flight_path(const std::filesystem::path& folder, int /*rank*/) {
  return folder;
}
void make_flight_folder(const std::filesystem::path& /*folder*/) {}

std::string comm::host_identity() { return "this host"; }

Communicator connect_world(const WorldOptions& /*options*/) {
  throw UsageError("world: built without a rendezvous");
}

}  // namespace hsdp
