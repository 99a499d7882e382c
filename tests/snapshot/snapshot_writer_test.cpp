// Writing in the background, and what happens when the disk fails.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "hsdp/error.h"
#include "hsdp/snapshot.h"
#include "tests/snapshot/written_snapshot.h"

namespace hsdp {
namespace {

using namespace hsdp::testing;
using test::names_in;

TEST(SnapshotWriter, KeepsTheDataOfTheMomentOfSubmit) {
  const TemporaryDirectory folder;
  auto gradients = some_gradients();
  const auto before = gradients;
  SnapshotInfo info = mesh_info(1, 1);
  SnapshotWriter writer;
  writer.submit(folder / "first", info, slices_of(gradients, info));
  for (NamedGradient& gradient : gradients) {
    std::fill(gradient.data.begin(), gradient.data.end(), -1.0F);
  }
  info.step = 43;
  writer.submit(folder / "second", info, slices_of(gradients, info));
  writer.flush();
  const Snapshot first = Snapshot::open(folder / "first");
  const Snapshot second = Snapshot::open(folder / "second");
  for (std::size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(read_all(first, i), before[i].data);
    EXPECT_EQ(read_all(second, i), gradients[i].data);
  }
}

TEST(SnapshotWriter, FinishesInItsDestructor) {
  const TemporaryDirectory folder;
  const auto gradients = some_gradients();
  const SnapshotInfo info = mesh_info(1, 1);
  {
    SnapshotWriter writer;
    writer.submit(folder / "s", info, slices_of(gradients, info));
  }
  EXPECT_EQ(read_all(Snapshot::open(folder / "s"), 0), gradients[0].data);
}

TEST(SnapshotWriter, KnowsAtOnceWhatCannotBeMade) {
  const TemporaryDirectory folder;
  write_bytes(folder / "file", {'x'});
  const SnapshotInfo info = mesh_info(1, 1);
  const auto gradients = some_gradients();
  SnapshotWriter writer;
  EXPECT_THROW(writer.submit(folder / "file/s", info, slices_of(gradients, info)), SnapshotError);
  EXPECT_THROW(writer.submit(folder / "absent/s.h5", info, slices_of(gradients, info)),
               SnapshotError);
  SnapshotInfo bad = info;
  bad.rank = 1;
  EXPECT_THROW(writer.submit(folder / "s", bad, slices_of(gradients, info)), UsageError);
  EXPECT_NO_THROW(writer.flush());
  EXPECT_FALSE(std::filesystem::exists(folder / "s"));
}

TEST(SnapshotWriter, TellsALateErrorOnce) {
  const TemporaryDirectory folder;
  const SnapshotInfo info = mesh_info(1, 1);
  const auto gradients = some_gradients();
  std::filesystem::create_directories(folder / "s/rank_00000.h5/in_the_way");
  SnapshotWriter writer;
  writer.submit(folder / "s", info, slices_of(gradients, info));
  EXPECT_THROW(writer.flush(), SnapshotError);
  EXPECT_NO_THROW(writer.flush());
  writer.submit(folder / "t", info, slices_of(gradients, info));
  EXPECT_NO_THROW(writer.flush());
  EXPECT_EQ(read_all(Snapshot::open(folder / "t"), 0), gradients[0].data);
}

TEST(SnapshotWriter, WritesFromManyThreadsAtOnce) {
  const TemporaryDirectory folder;
  const auto gradients = some_gradients();
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 6; ++rank) {
      ranks.emplace_back([&, rank] {
        SnapshotInfo info = mesh_info(2, 3);
        info.rank = rank;
        SnapshotWriter writer;
        writer.submit(folder / "s", info, slices_of(gradients, info));
        writer.flush();
      });
    }
  }
  const Snapshot snapshot = Snapshot::open(folder / "s");
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    EXPECT_EQ(read_all(snapshot, i, 1), gradients[i].data);
  }
}

// Files of ranks that the new mesh does not have are removed; files that are no snapshots stay.
TEST(SnapshotFile, ReplacesAnEarlierOneOfALargerMesh) {
  const TemporaryDirectory folder;
  write_mesh(folder / "s", some_gradients(1), mesh_info(2, 2));
  write_bytes(folder / "s/rank_7.h5", {'x'});
  write_bytes(folder / "s/rank_00007.h5.old", {'x'});
  SnapshotInfo info = mesh_info(1, 2);
  info.id = "another";
  const auto gradients = some_gradients(2);
  info.rank = 1;
  write_snapshot_file(folder / "s", info, slices_of(gradients, info));
  EXPECT_THROW(static_cast<void>(Snapshot::open(folder / "s")), SnapshotError);
  EXPECT_TRUE(std::filesystem::exists(folder / "s/rank_00003.h5"));
  info.rank = 0;
  write_snapshot_file(folder / "s", info, slices_of(gradients, info));
  EXPECT_EQ(read_all(Snapshot::open(folder / "s"), 0), gradients[0].data);
  EXPECT_EQ(names_in(folder / "s"), (std::vector<std::string>{"rank_00000.h5", "rank_00001.h5",
                                                              "rank_00007.h5.old", "rank_7.h5"}));
  // Writes plain arrays of one rank into the same folder.
  write_snapshot(folder / "s", mesh_info(1, 1, "full"),
                 slices_of(gradients, mesh_info(1, 1, "full")));
  EXPECT_EQ(read_all(Snapshot::open(folder / "s"), 0), gradients[0].data);
}

// Readers refuse the folder, but other programs' files must not be deleted.
TEST(SnapshotFile, RemovesNoFilesButSnapshots) {
  const TemporaryDirectory folder;
  write_mesh(folder / "s", some_gradients(1), mesh_info(2, 2));
  const std::vector<char> foreign{'\x89', 'H', 'D', 'F'};
  write_bytes(folder / "s/rank_00002.h5", foreign);
  write_bytes(folder / "s/rank_00004.h5", {});
  std::filesystem::create_directory(folder / "s/rank_00005.h5");
  std::filesystem::create_symlink("rank_00000.h5", folder / "s/rank_00006.h5");
  write_mesh(folder / "s", some_gradients(2), mesh_info(1, 1));
  EXPECT_EQ(names_in(folder / "s"),
            (std::vector<std::string>{"rank_00000.h5", "rank_00002.h5", "rank_00004.h5",
                                      "rank_00005.h5", "rank_00006.h5"}));
  EXPECT_EQ(file_bytes(folder / "s/rank_00002.h5"), foreign);
  EXPECT_THROW(static_cast<void>(Snapshot::open(folder / "s")), SnapshotError);
}

// Writes to small file systems in a mount namespace of a child process. They have no room for the
// data, for the file's structure, or for anything.
int fill_disks(const std::filesystem::path& folder) {
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) {
    return 77;
  }
  for (const char* size : {"size=4k", "size=8k", "size=16k", "size=64k", "size=512k"}) {
    if (::mount("none", folder.c_str(), "tmpfs", 0, size) != 0) return 77;
    try {
      write_mesh(folder, some_gradients(), mesh_info(1, 1));
      return 1;
    } catch (const SnapshotError&) {
      if (!names_in(folder).empty()) return 2;
    }
    ::umount(folder.c_str());
  }
  // The process can still write.
  write_mesh(folder, some_gradients(), mesh_info(1, 1));
  return Snapshot::open(folder).parameters().size() == some_gradients().size() ? 0 : 3;
}

TEST(SnapshotFile, LeavesNothingOnAFullDisk) {
  const TemporaryDirectory folder;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) std::exit(fill_disks(folder.path()));
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << "no right to mount a small file system";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

// Kills the writer at many moments. The file must be the old one or the new one, complete.
TEST(SnapshotFile, IsOldOrNewWhenItsWriterIsKilled) {
  const TemporaryDirectory folder;
  const auto old_gradients = some_gradients(1);
  const auto new_gradients = some_gradients(2);
  write_mesh(folder / "s", old_gradients, mesh_info(1, 1));
  for (int round = 0; round < 20; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      while (true) write_mesh(folder / "s", new_gradients, mesh_info(1, 1));
    }
    ::usleep(static_cast<useconds_t>(500 * round));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const std::vector<float> read = read_all(Snapshot::open(folder / "s"), 6);
    EXPECT_TRUE(read == old_gradients[6].data || read == new_gradients[6].data);
  }
}

}  // namespace
}  // namespace hsdp
