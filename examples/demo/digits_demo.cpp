// Trains the digit network on a 2x2 mesh, checks every claim about it and prints one screen.
// Exit status: 0 if all claims hold, 1 if one does not, 2 if it could not be checked.
//
//   digits_demo --build build/release
#include <unistd.h>

#include <boost/program_options.hpp>
#include <cstdio>
#include <exception>
#include <iostream>

#include "examples/demo/claims.h"
#include "examples/demo/loss_plot.h"
#include "examples/digits/digit_set.h"

namespace examples {
namespace {

TrainingResult train_on_mesh(const DemoOptions& options, const MeshRun& run) {
  run_job(mesh_command(options, run));
  return read_result(result_path(options, run.name));
}

class Demo {
 public:
  Demo(DemoOptions options, Screen& screen) : options_(std::move(options)), screen_(screen) {}

  void run() {
    const auto start = std::chrono::steady_clock::now();
    train();
    compare_gradients();
    train_other_ways();
    screen_.doing("training until rank 2 is killed");
    screen_.show(kill_claim(options_));
    show_files();
    screen_.end(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }

 private:
  void train() {
    screen_.doing("training on the mesh, and alone beside it");
    Job alone(alone_command(options_), std::chrono::seconds(120));
    mesh_run_ = {.name = "mesh", .snapshot_steps = options_.snapshot_steps()};
    mesh_ = train_on_mesh(options_, mesh_run_);
    const JobOutcome outcome = alone.wait();
    if (outcome.status != 0) {
      throw std::runtime_error("train_alone failed; it printed:\n" + outcome.output);
    }
    alone_ = read_result(result_path(options_, "alone"));
    screen_.show(loss_claim(mesh_, alone_));
    screen_.show(accuracy_claim(mesh_, alone_));
    screen_.show(collectives_claim(mesh_));
  }

  void compare_gradients() {
    screen_.doing("recomputing gradients in float64");
    screen_.show(gradient_claim(options_, mesh_run_));
    screen_.doing("training with the all-reduce before the sum over microbatches");
    const MeshRun wrong{
        .name = "wrong_order", .snapshot_steps = {1}, .program = "train_wrong_order"};
    wrong_ = train_on_mesh(options_, wrong);
    screen_.show(wrong_order_claim(options_, wrong));
  }

  void train_other_ways() {
    std::vector<TrainingResult> runs = {mesh_};
    for (const MeshRun& run :
         {MeshRun{.name = "large_buckets", .bucket_bytes = "65536"},
          MeshRun{.name = "tcp", .transport = "tcp"},
          MeshRun{.name = "tcp_large_buckets", .transport = "tcp", .bucket_bytes = "65536"}}) {
      screen_.doing("the same training again: " + run.name);
      runs.push_back(train_on_mesh(options_, run));
    }
    screen_.show(same_bits_claim(runs));
  }

  void show_files() {
    const std::filesystem::path curves = options_.out / "loss.svg";
    write_loss_plot(curves, "Cross-entropy while learning to read digits",
                    {{"one process, float64", "#b9cbe0", 8, alone_.losses},
                     {"2x2 mesh, bf16 on the wire", "#14508f", 2, mesh_.losses},
                     {"accumulated after the all-reduce", "#dd6b20", 2, wrong_.losses}});
    std::cout << '\n';
    screen_.file("loss curves", curves.string());
    screen_.file("gradients, parameter by parameter", report_path(options_, "mesh").string());
    screen_.file("the same, in the wrong order", report_path(options_, "wrong_order").string());
  }

  DemoOptions options_;
  Screen& screen_;
  MeshRun mesh_run_;
  TrainingResult mesh_;
  TrainingResult alone_;
  TrainingResult wrong_;
};

DemoOptions parse_demo_options(int argc, char** argv) {
  namespace po = boost::program_options;
  DemoOptions options;
  po::options_description description("Options");
  auto add = description.add_options();
  add("build", po::value(&options.build)->required(), "where the programs were built");
  add("data", po::value(&options.data), "the digits; default: digits.csv in the build folder");
  add("out", po::value(&options.out), "for results; default: demo in the build folder");
  add("steps", po::value(&options.step_count)->default_value(options.step_count), "of training");
  add("kill-limit-s", po::value(&options.kill_limit_s)->default_value(options.kill_limit_s),
      "within which a killed rank has to be named");
  po::variables_map values;
  po::store(po::parse_command_line(argc, argv, description), values);
  po::notify(values);
  options.data = options.data.empty() ? options.build / "digits.csv" : options.data;
  options.out = options.out.empty() ? options.build / "demo" : options.out;
  return options;
}

int run(int argc, char** argv) {
  const DemoOptions options = parse_demo_options(argc, argv);
  const DigitData data = load_digits(options.data);
  std::filesystem::create_directories(options.out);
  for (const char* const snapshots : {"mesh", "wrong_order"}) {
    std::filesystem::remove_all(options.out / snapshots);  // left by an earlier run
  }
  Screen screen(std::cout, isatty(STDOUT_FILENO) != 0);
  screen.title("hsdp: a network of 64-256-128-10 learns to read " +
                   std::to_string(data.train.size()) + " digits",
               {"4 processes as 2 replicas x 2 shards, 4 microbatches a step, bf16 on the wire",
                "data: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, "
                "CC BY 4.0"});
  Demo(options, screen).run();
  return screen.all_hold() ? 0 : 1;
}

}  // namespace
}  // namespace examples

int main(int argc, char** argv) {
  try {
    return examples::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "\ndigits_demo: %s\n", error.what());
    return 2;
  }
}
