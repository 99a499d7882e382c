// Damaged, foreign and hostile files: each is refused with a message, and none does harm.
#include <gmock/gmock.h>
#include <sys/stat.h>

#include <cstring>
#include <functional>
#include <utility>

#include "hsdp/compare.h"
#include "hsdp/error.h"
#include "hsdp/snapshot/atomic_file.h"
#include "hsdp/snapshot/block_checksums.h"
#include "hsdp/snapshot/snapshot_header.h"
#include "hsdp/validate.h"
#include "tests/snapshot/written_snapshot.h"

namespace hsdp {
namespace {

using namespace hsdp::testing;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The error message if the snapshot is refused; empty if it is accepted.
std::string refusal(const std::filesystem::path& path) {
  try {
    static_cast<void>(validate_snapshot(Snapshot::open(path), {.thread_count = 1}));
  } catch (const SnapshotError& error) {
    EXPECT_STRNE(error.what(), "");
    return error.what();
  }
  return {};
}

std::vector<NamedGradient> two_gradients() {
  return {{"w", {3, 2}, random_values(6, 1)}, {"b", {5}, random_values(5, 2)}};
}

TEST(SnapshotDamage, EveryFlippedBitIsFound) {
  const TemporaryDirectory folder;
  write_mesh(folder / "s", two_gradients(), mesh_info(1, 1));
  const auto path = folder / "s/rank_00000.h5";
  const std::vector<char> good = file_bytes(path);
  ASSERT_EQ(refusal(folder / "s"), "");
  std::fstream file(path, std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&](std::size_t position, char byte) {
    file.seekp(static_cast<std::streamoff>(position));
    file.put(byte).flush();
  };
  for (std::size_t i = 0; i < good.size(); ++i) {
    put(i, static_cast<char>(good[i] ^ (1 << (i % 8))));
    ASSERT_NE(refusal(folder / "s"), "") << "byte " << i;
    put(i, good[i]);
  }
  EXPECT_EQ(refusal(folder / "s"), "");
}

TEST(SnapshotDamage, NamesTheElementsOfADamagedBlock) {
  const TemporaryDirectory folder;
  const std::vector<NamedGradient> gradients{{"big", {200000}, random_values(200000, 1)}};
  write_mesh(folder / "s", gradients, mesh_info(1, 1));
  const auto path = folder / "s/rank_00000.h5";
  std::vector<char> bytes = file_bytes(path);
  // The third block of 256 KiB begins at element 131072.
  char pattern[8];
  std::memcpy(pattern, &gradients[0].data[140000], sizeof pattern);
  const auto at = std::search(bytes.begin(), bytes.end(), pattern, pattern + sizeof pattern);
  ASSERT_NE(at, bytes.end());
  *at = static_cast<char>(*at ^ 1);
  write_bytes(path, bytes);
  EXPECT_THAT(refusal(folder / "s"), HasSubstr("elements 131072 and following of 'big'"));
  const Snapshot snapshot = Snapshot::open(folder / "s");
  std::array<float, 4> values{};
  EXPECT_NO_THROW(snapshot.read(0, 0, 131068, std::span<float>(values)));
  EXPECT_THROW(snapshot.read(0, 0, 131072, std::span<float>(values)), SnapshotError);
  EXPECT_THROW(static_cast<void>(compare_snapshots(snapshot, snapshot)), SnapshotError);
}

TEST(SnapshotDamage, EveryTruncationAndEveryTailIsFound) {
  const TemporaryDirectory folder;
  write_mesh(folder / "s", two_gradients(), mesh_info(1, 1));
  const auto path = folder / "s/rank_00000.h5";
  const std::vector<char> good = file_bytes(path);
  for (std::size_t length = 0; length < good.size(); length += length < 64 ? 1 : 97) {
    write_bytes(path, {good.begin(), good.begin() + static_cast<std::ptrdiff_t>(length)});
    ASSERT_NE(refusal(folder / "s"), "") << length;
  }
  write_bytes(path, {good.begin(), good.end() - 1});
  EXPECT_THAT(refusal(folder / "s"), HasSubstr("truncated: expected"));
  std::vector<char> longer = good;
  longer.push_back('x');
  write_bytes(path, longer);
  EXPECT_THAT(refusal(folder / "s"), HasSubstr("foreign bytes"));
}

class MixedSnapshot : public ::testing::Test {
 protected:
  MixedSnapshot() { write_mesh(folder_ / "s", two_gradients(), mesh_info(2, 2)); }

  // Replaces the file of rank 3.
  void replace(SnapshotInfo info, const std::vector<NamedGradient>& gradients = two_gradients()) {
    info.rank = 3;
    write_snapshot_file(folder_ / "s", info, slices_of(gradients, info));
  }
  std::string refuse() { return refusal(folder_ / "s"); }

  TemporaryDirectory folder_;
};

TEST_F(MixedSnapshot, NamesMissingRanks) {
  std::filesystem::remove(folder_ / "s/rank_00001.h5");
  EXPECT_THAT(refuse(), HasSubstr("missing 1 (rank 1); the folder has to be on a file system"));
  std::filesystem::remove(folder_ / "s/rank_00000.h5");
  EXPECT_THAT(refuse(), HasSubstr("missing 2 (rank 0, 1)"));
}

TEST_F(MixedSnapshot, RefusesFilesOfOtherRunsOrParameters) {
  using Gradients = std::vector<NamedGradient>;
  const std::pair<const char*, std::function<void(SnapshotInfo&, Gradients&)>> rows[] = {
      {"mixed: rank_00000.h5 and rank_00003.h5 differ: id",
       [](auto& info, auto&) { info.id = "another"; }},
      {"differ: step 42 and 43; if ranks are still saving, wait for them; else save",
       [](auto& info, auto&) { info.step = 43; }},
      {"partial", [](auto& info, auto&) { info.partial = true; }},
      {"mesh", [](auto& info, auto&) { info = mesh_info(4, 1); }},
      {"'b' and 'c'", [](auto&, auto& gradients) { gradients[1].name = "c"; }},
      {"shape of 'w'",
       [](auto&, auto& gradients) {
         gradients[0].shape = {2, 3};
       }},
      {"number of parameters", [](auto&, auto& gradients) { gradients.pop_back(); }},
  };
  for (const auto& [text, change] : rows) {
    SnapshotInfo info = mesh_info(2, 2);
    Gradients gradients = two_gradients();
    change(info, gradients);
    replace(info, gradients);
    EXPECT_THAT(refuse(), HasSubstr(text));
  }
}

TEST_F(MixedSnapshot, RefusesFilesUnderWrongNames) {
  std::filesystem::copy_file(folder_ / "s/rank_00002.h5", folder_ / "s/rank_00003.h5",
                             std::filesystem::copy_options::overwrite_existing);
  EXPECT_THAT(refuse(), HasSubstr("rank_00003.h5: mixed: the file is of rank 2"));
  replace(mesh_info(2, 2));
  std::filesystem::copy_file(folder_ / "s/rank_00002.h5", folder_ / "s/rank_00004.h5");
  EXPECT_THAT(
      refuse(),
      HasSubstr("rank_00004.h5 is of another run; expected 4 files; if ranks are still saving"));
}

TEST_F(MixedSnapshot, RefusesSlicesThatDoNotTile) {
  SnapshotInfo info = mesh_info(2, 2);
  info.rank = 3;
  const auto gradients = two_gradients();  // the entries point into it
  auto entries = slices_of(gradients, info);
  entries[0].data.count -= 1;
  write_snapshot_file(folder_ / "s", info, entries);
  EXPECT_THAT(refuse(), HasSubstr("slices of 'w' in copy 1 do not tile"));
  entries = slices_of(gradients, info);
  entries[1].offset -= 1;
  write_snapshot_file(folder_ / "s", info, entries);
  EXPECT_THAT(refuse(), HasSubstr("slices of 'b' in copy 1 do not tile"));
}

TEST_F(MixedSnapshot, AsksForTheDirectoryOfASingleFile) {
  EXPECT_THAT(refusal(folder_ / "s/rank_00002.h5"), HasSubstr("give the directory"));
}

TEST_F(MixedSnapshot, IgnoresWhatKilledWritersLeave) {
  write_bytes(folder_ / "s/.rank_00001.h5.0123.tmp", {'x'});
  write_bytes(folder_ / "s/notes.txt", {'x'});
  EXPECT_EQ(refuse(), "");
}

TEST_F(MixedSnapshot, SaysWhereAFileIsStillBeingWritten) {
  constexpr const char* kRemedy = "call flush() of the Reducer that saves it";
  std::filesystem::remove(folder_ / "s/rank_00001.h5");
  EXPECT_THAT(refuse(), AllOf(HasSubstr("missing 1 (rank 1)"), Not(HasSubstr(kRemedy))));
  const AtomicFile second(folder_ / "s/rank_00001.h5");
  EXPECT_THAT(refuse(), AllOf(HasSubstr("missing 1 (rank 1)"), HasSubstr(kRemedy)));
  std::filesystem::create_directory(folder_ / "new");
  const AtomicFile first(folder_ / "new/rank_00000.h5");
  EXPECT_THAT(refusal(folder_ / "new"), AllOf(HasSubstr("holds no snapshot"), HasSubstr(kRemedy)));
}

TEST(ForeignFiles, AreNamedAsWhatTheyAre) {
  const TemporaryDirectory folder;
  EXPECT_THAT(refusal(folder / "absent"), HasSubstr("cannot open: No such file"));
  std::filesystem::create_directory(folder / "bare");
  EXPECT_THAT(refusal(folder / "bare"), HasSubstr("holds no snapshot"));
  write_bytes(folder / "empty.h5", {});
  EXPECT_THAT(refusal(folder / "empty.h5"), HasSubstr("not a snapshot"));
  const std::string hdf5 = "\x89HDF\r\n\x1a\n and more than that to make a header of it";
  write_bytes(folder / "other.h5", {hdf5.begin(), hdf5.end()});
  EXPECT_THAT(refusal(folder / "other.h5"), HasSubstr("an HDF5 file, but not a snapshot"));
  ASSERT_EQ(::mkfifo((folder / "pipe.h5").c_str(), 0600), 0);
  EXPECT_THAT(refusal(folder / "pipe.h5"), HasSubstr("not a regular file"));
  EXPECT_THAT(refusal("/dev/zero"), HasSubstr("not a regular file"));
}

// A header with valid checksums and wrong numbers.
class HostileHeader : public ::testing::Test {
 protected:
  HostileHeader() {
    SnapshotInfo info = mesh_info(1, 1);
    write_mesh(folder_ / "s", two_gradients(), info);
    bytes_ = file_bytes(path());
  }
  [[nodiscard]] std::filesystem::path path() const { return folder_ / "s/rank_00000.h5"; }

  std::string json() const {
    const HeaderPrefix prefix = decode_prefix(std::as_bytes(std::span(bytes_)));
    return {bytes_.data() + kHeaderPrefixBytes, prefix.json_bytes};
  }

  std::string refusal_with_json(const std::string& text) {
    std::vector<char> bad = bytes_;
    HeaderPrefix prefix = decode_prefix(std::as_bytes(std::span(bad)));
    bad.resize(std::max(bad.size(), kHeaderPrefixBytes + text.size()));
    prefix.file_bytes = bad.size();
    prefix.json_bytes = static_cast<std::uint32_t>(text.size());
    const PrefixBytes sealed = encode_prefix(prefix, text);
    std::memcpy(bad.data(), sealed.data(), sealed.size());
    std::memcpy(bad.data() + kHeaderPrefixBytes, text.data(), text.size());
    write_bytes(path(), bad);
    return refusal(folder_ / "s");
  }

  // Replaces the value of the first `key` and recomputes the header's checksum.
  std::string refusal_with(const std::string& key, const std::string& value) {
    std::string text = json();
    const std::string quoted = '"' + key + "\":";
    const std::size_t begin = text.find(quoted) + quoted.size();
    std::size_t end = text.find_first_of(",}", begin);
    if (text[begin] == '[') end = text.find(']', begin) + 1;
    return refusal_with_json(text.replace(begin, end - begin, value));
  }

  TemporaryDirectory folder_;
  std::vector<char> bytes_;
};

TEST_F(HostileHeader, OfAnotherSchemaIsNamed) {
  bytes_[8] = 3;
  write_bytes(path(), bytes_);
  EXPECT_THAT(refusal(folder_ / "s"),
              HasSubstr("unsupported schema version: expected 1 to 2, got 3"));
}

TEST_F(HostileHeader, WithImpossibleNumbersIsRefused) {
  const std::vector<std::pair<std::string, std::vector<std::string>>> lies{
      {"replicate_size", {"0", "-1", "1048577", "1e9", "18446744073709551615", "null"}},
      {"shard_size", {"2", "1048576", "\"1\""}},
      {"rank", {"1", "-1", "99999999999999999999"}},
      {"file_count", {"0", "2", "1.5"}},
      {"divide_factor", {"0", "1e400", "1e300", "1e39", "1e-39", "\"x\"", "null"}},
      {"loss_scale", {"0", "-1", "false"}},
      {"replica_dtype", {"\"f8\"", "7"}},
      {"layout", {"\"rows\"", "[]"}},
      {"partial", {"1", "\"no\""}},
      {"id", {"\"\"", "7"}},
      {"checksum_block_bytes", {"0", "1"}},
      {"checksums_offset", {"0", "9223372036854775807", "-8"}},
      {"shape", {"[3,2,4611686018427387904]", "[-1]", "[4294967296,4294967296]", "[[3],2]", "3"}},
      {"offset", {"1", "-1", "9223372036854775807"}},
      {"count", {"5", "7", "-6", "9223372036854775807"}},
      {"data_dtype", {"\"f64\"", "\"i64\"", "\"u8\""}},
      {"data_offset", {"0", "8", "9223372036854775807", "18446744073709551615"}},
      {"name", {"\"\"", "\"b\"", "[]", "\"\\ud800\""}}};
  for (const auto& [key, values] : lies) {
    for (const std::string& value : values) {
      EXPECT_NE(refusal_with(key, value), "") << key << " = " << value;
    }
  }
}

TEST_F(HostileHeader, WithBadJsonIsRefused) {
  for (const std::string& text :
       {std::string(), std::string("null"), std::string("{}"), json().substr(0, json().size() / 2),
        std::string("{\"id\":\"\xff\"}")}) {
    EXPECT_NE(refusal_with_json(text), "") << text;
  }
  EXPECT_THAT(refusal_with_json(std::string(100000, '[')), HasSubstr("too deeply"));
}

TEST(SnapshotHeader, OfAnyBytesIsSurvived) {
  std::mt19937 engine(7);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::byte> bytes(engine() % 96);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine());
    if (!bytes.empty()) {
      std::memcpy(bytes.data(), kSnapshotMagic.data(), std::min(bytes.size(), std::size_t{8}));
    }
    EXPECT_THROW(static_cast<void>(decode_prefix(bytes)), SnapshotError);
  }
}

TEST(Printable, TakesControlCharactersOut) {
  EXPECT_EQ(printable("a\x1b[31mb\n\x7f"), "a?[31mb??");
  EXPECT_EQ(printable("\xc2\x9b"), "??");
  EXPECT_EQ(printable("h\xc3\xa9llo", 2), "h...");
}

}  // namespace
}  // namespace hsdp
