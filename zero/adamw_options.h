// The hyperparameters of zero::AdamW; the defaults are those of torch.optim.AdamW.
#pragma once

namespace hsdp::zero {

struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 1e-2;
};

}  // namespace hsdp::zero
