// How the writer of a snapshot uses what the rest of the process also uses: the HDF5 library, its
// error handler, and folders.
//
// This program's H5Fcreate and fsync replace those of the libraries. They record each call and
// forward it.
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hdf5.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hsdp/error.h"
#include "hsdp/snapshot.h"
#include "tests/snapshot/written_snapshot.h"

namespace {

std::mutex seen_mutex;
std::vector<std::thread::id> hdf5_threads;
std::set<ino_t> synced;
std::atomic<bool> hdf5_fails{false};

}  // namespace

extern "C" hid_t H5Fcreate(const char* name, unsigned flags, hid_t creation, hid_t access) {
  static const auto real = reinterpret_cast<decltype(&H5Fcreate)>(::dlsym(RTLD_NEXT, "H5Fcreate"));
  {
    const std::lock_guard lock(seen_mutex);
    hdf5_threads.push_back(std::this_thread::get_id());
  }
  constexpr hid_t kNoList = 12345;
  return real(name, flags, creation, hdf5_fails ? kNoList : access);
}

extern "C" int fsync(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) == 0) {
    const std::lock_guard lock(seen_mutex);
    synced.insert(info.st_ino);
  }
  return static_cast<int>(::syscall(SYS_fsync, fd));
}

namespace hsdp {
namespace {

using namespace hsdp::testing;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::ThrowsMessage;

class Hdf5Use : public ::testing::Test {
 protected:
  void SetUp() override {
    hdf5_threads.clear();
    synced.clear();
  }
  void TearDown() override {
    hdf5_fails = false;
    set_hdf5_gate({});
    H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  }
  void write(const std::filesystem::path& path) const {
    write_snapshot_file(path, info_, slices_of(gradients_, info_));
  }

  const TemporaryDirectory folder_;
  const std::vector<NamedGradient> gradients_ = some_gradients();
  const SnapshotInfo info_ = mesh_info(1, 1);
};

TEST_F(Hdf5Use, IsOnTheCallersThreadAlsoWhenTheRestIsNot) {
  write(folder_ / "now");
  SnapshotWriter writer;
  writer.submit(folder_ / "later", info_, slices_of(gradients_, info_));
  writer.flush();
  EXPECT_THAT(hdf5_threads, SizeIs(2));
  EXPECT_THAT(hdf5_threads, Each(std::this_thread::get_id()));
  EXPECT_EQ(read_all(Snapshot::open(folder_ / "later"), 0), gradients_[0].data);
  EXPECT_THAT(hdf5_threads, SizeIs(2));  // reading does not use HDF5
}

TEST_F(Hdf5Use, GoesThroughTheGate) {
  bool inside = false;
  int passed = 0;
  set_hdf5_gate([&](const std::function<void()>& enter) {
    inside = true;
    const std::size_t before = hdf5_threads.size();
    enter();
    EXPECT_EQ(hdf5_threads.size(), before + 1);
    inside = false;
    ++passed;
  });
  write(folder_ / "now");
  SnapshotWriter writer;
  writer.submit(folder_ / "later", info_, slices_of(gradients_, info_));
  writer.flush();
  EXPECT_EQ(passed, 2);
  EXPECT_EQ(hdf5_threads.size(), 2U);
  set_hdf5_gate([](const std::function<void()>&) { throw std::runtime_error("closed"); });
  EXPECT_THAT([&] { write(folder_ / "never"); }, ThrowsMessage<std::runtime_error>("closed"));
  EXPECT_EQ(hdf5_threads.size(), 2U);
  EXPECT_TRUE(std::filesystem::is_empty(folder_ / "never"));
}

herr_t count_error(hid_t /*stack*/, void* count) {
  ++*static_cast<int*>(count);
  return 0;
}

herr_t count_old_error(void* count) {
  ++*static_cast<int*>(count);
  return 0;
}

// The handler must stay when the write succeeds and when HDF5 fails.
TEST_F(Hdf5Use, LeavesTheErrorHandlerAsItWas) {
  int count = 0;
  H5Eset_auto2(H5E_DEFAULT, count_error, &count);
  const auto expect_kept = [&] {
    H5E_auto2_t handler = nullptr;
    void* data = nullptr;
    ASSERT_GE(H5Eget_auto2(H5E_DEFAULT, &handler, &data), 0);
    EXPECT_EQ(handler, &count_error);
    EXPECT_EQ(data, &count);
  };
  write(folder_ / "good");
  expect_kept();
  hdf5_fails = true;
  EXPECT_THAT([&] { write(folder_ / "bad"); },
              ThrowsMessage<SnapshotError>(HasSubstr("HDF5 could not create a file")));
  expect_kept();
  EXPECT_EQ(count, 0);
  H5Fclose(-1);  // the handler still works
  EXPECT_EQ(count, 1);
}

TEST_F(Hdf5Use, LeavesAnErrorHandlerOfTheOldKindAsItWas) {
  int count = 0;
  H5Eset_auto1(count_old_error, &count);
  for (const bool fails : {false, true}) {
    hdf5_fails = fails;
    try {
      write(folder_ / "old");
    } catch (const SnapshotError&) {
      EXPECT_TRUE(fails);
    }
    H5E_auto1_t handler = nullptr;
    void* data = nullptr;
    ASSERT_GE(H5Eget_auto1(&handler, &data), 0);
    EXPECT_EQ(handler, &count_old_error);
    EXPECT_EQ(data, &count);
  }
  EXPECT_EQ(count, 0);
}

// A crash after the call must not lose a folder that the call created.
TEST_F(Hdf5Use, EveryFolderThatHasGotANewNameInItIsSynced) {
  const auto inode = [](const std::filesystem::path& path) {
    struct stat info {};
    EXPECT_EQ(::stat(path.c_str(), &info), 0) << path;
    return info.st_ino;
  };
  std::filesystem::create_directory(folder_ / "there");
  for (const std::string last : {"step", "other/"}) {
    synced.clear();
    write(folder_ / "there/run" / last);
    EXPECT_EQ(synced.count(inode(folder_ / "there/run" / last)), 1U);
    EXPECT_EQ(synced.count(inode(folder_ / "there/run")), 1U) << last;
    EXPECT_EQ(synced.count(inode(folder_ / "there")), last == "step" ? 1U : 0U);
    EXPECT_EQ(synced.count(inode(folder_ / ".")), 0U);
  }
  synced.clear();
  SnapshotWriter writer;
  writer.submit(folder_ / "there/later/step", info_, slices_of(gradients_, info_));
  writer.flush();
  EXPECT_EQ(synced.count(inode(folder_ / "there/later")), 1U);
  EXPECT_EQ(synced.count(inode(folder_ / "there")), 1U);
}

}  // namespace
}  // namespace hsdp
