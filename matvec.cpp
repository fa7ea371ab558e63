// A bf16 matrix times one vector, as fast as memory gives the matrix. matvec.py compiles this file.
//
// Each weight is read once and used once, so the reading is what takes the time. Two things keep the
// reads coming: sums so wide that no addition waits for the one before, and asking for what is
// needed in 8 KiB (by itself the processor fetches ahead only to the end of a page of 4 KiB). It
// goes to the second cache, not to the first, where what runs between two products stays.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <cstring>
#include <vector>

using torch::headeronly::BFloat16;
using torch::stable::Tensor;

constexpr int BLOCK = 32;               // weights that are multiplied and added at once: 64 bytes
constexpr int64_t AHEAD = 4096;         // weights: 8 KiB
constexpr int64_t PER_THREAD = 1 << 15; // weights: fewer are not worth waking a thread

inline float widen(BFloat16 w) { // as BFloat16 does it, in a form that g++ makes vectors of
  uint32_t word = uint32_t(w.x) << 16;
  float wide;
  std::memcpy(&wide, &word, sizeof wide);
  return wide;
}

float dot(const BFloat16* w, const float* x, int64_t n) {
  float sums[BLOCK] = {};
  int64_t i = 0;
  for (; i + BLOCK <= n; i += BLOCK) {
    __builtin_prefetch(w + i + AHEAD, /*for writing*/ 0, /*which cache*/ 1);
#pragma omp simd
    for (int k = 0; k < BLOCK; k++) sums[k] += widen(w[i + k]) * x[i + k];
  }
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int k = 0; k < BLOCK; k++) sum += sums[k];
  for (; i < n; i++) sum += widen(w[i]) * x[i];
  return sum;
}

// weight (outputs, inputs), x (inputs,) -> (outputs,), all bf16 and contiguous; sums in fp32
Tensor matvec(const Tensor& weight, const Tensor& x) {
  STD_TORCH_CHECK(weight.dim() == 2 && x.dim() == 1 && weight.size(1) == x.size(0),
                  "matvec: weight is (outputs, inputs) and x is (inputs,)");
  int64_t outputs = weight.size(0), inputs = weight.size(1);
  Tensor y = torch::stable::new_empty(x, {outputs});
  auto w = (const BFloat16*)weight.const_data_ptr();
  auto from = (const BFloat16*)x.const_data_ptr();
  auto to = (BFloat16*)y.mutable_data_ptr();
  std::vector<float> wide(inputs);
  for (int64_t i = 0; i < inputs; i++) wide[i] = widen(from[i]);
  int64_t at_least = 1 + PER_THREAD / (1 + inputs); // outputs a thread
  torch::stable::parallel_for(0, outputs, at_least, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++)
      to[row] = BFloat16(dot(w + row * inputs, wide.data(), inputs));
  });
  return y;
}

STABLE_TORCH_LIBRARY(gpt, m) { m.def("matvec(Tensor weight, Tensor x) -> Tensor"); }
STABLE_TORCH_LIBRARY_IMPL(gpt, CPU, m) { m.impl("matvec", TORCH_BOX(&matvec)); }
