// Python module fastppo._C: fills each op's params struct and calls it, nothing else. Tensors arrive as integers
// (address, strides, dtype code), so the module knows no PyTorch ABI; what they hold is checked in fastppo/ops/<op>.py.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "common/cpu.h"
#include "csrc_hash.h"
#include "gae/gae.h"
#include "gae/whiten.h"
#include "linear_logprob/linear_logprob.h"
#include "logprob/logprob.h"
#include "loss_grad/loss_grad.h"
#include "ppo_loss/ppo_loss.h"
#include "value_loss/value_loss.h"

namespace py = pybind11;

namespace {

using fastppo::Dtype;
using fastppo::GaeParams;
using fastppo::GaeTensor;

template <typename T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// (address, row stride, time stride, dtype code), or None.
GaeTensor gae_tensor(const py::object& x) {
  if (x.is_none()) return GaeTensor{nullptr, 0, 0, Dtype::kFloat32};
  const py::tuple fields = x.cast<py::tuple>();
  return GaeTensor{pointer<const void>(fields[0].cast<uintptr_t>()), fields[1].cast<int64_t>(),
                   fields[2].cast<int64_t>(), static_cast<Dtype>(fields[3].cast<int>())};
}

void gae(const py::object& rewards, const py::object& values, const py::object& mask, const py::object& terminated,
         const py::object& truncated, const py::object& bootstrap_values, const py::object& final_values,
         uintptr_t lam_per_seq, uintptr_t lam_returns_per_seq, uintptr_t cu_seqlens, bool cu_seqlens_int64,
         uintptr_t advantages, uintptr_t returns, int64_t out_row_stride, int64_t out_time_stride, int64_t num_seqs,
         int64_t num_steps, float gamma, float lam, float lam_returns, bool separate_returns, uintptr_t scratch,
         uintptr_t moments, int num_threads, int device, uint64_t stream) {
  GaeParams params;
  params.rewards = gae_tensor(rewards);
  params.values = gae_tensor(values);
  params.mask = gae_tensor(mask);
  params.terminated = gae_tensor(terminated);
  params.truncated = gae_tensor(truncated);
  params.bootstrap_values = gae_tensor(bootstrap_values);
  params.final_values = gae_tensor(final_values);
  params.lam_per_seq = pointer<const float>(lam_per_seq);
  params.lam_returns_per_seq = pointer<const float>(lam_returns_per_seq);
  params.cu_seqlens = pointer<const void>(cu_seqlens);
  params.cu_seqlens_int64 = cu_seqlens_int64;
  params.advantages = pointer<float>(advantages);
  params.returns = pointer<float>(returns);
  params.out_row_stride = out_row_stride;
  params.out_time_stride = out_time_stride;
  params.num_seqs = num_seqs;
  params.num_steps = num_steps;
  params.gamma = gamma;
  params.lam = lam;
  params.lam_returns = lam_returns;
  params.separate_returns = separate_returns;
  params.scratch = pointer<void>(scratch);
  params.moments = pointer<fastppo::Moments>(moments);

  const py::gil_scoped_release no_gil;
#ifdef FASTPPO_HAS_CUDA
  if (device >= 0) return fastppo::gae_cuda(params, device, stream);
#else
  static_cast<void>(device);
  static_cast<void>(stream);
#endif
  fastppo::gae_cpu(params, num_threads);
}

// (address, rows per outer step, outer stride, inner stride).
fastppo::LogprobRows logprob_rows(const py::tuple& fields) {
  return fastppo::LogprobRows{pointer<void>(fields[0].cast<uintptr_t>()), fields[1].cast<int64_t>(),
                              fields[2].cast<int64_t>(), fields[3].cast<int64_t>()};
}

fastppo::LogprobParams logprob_params(const py::tuple& logits, int dtype, uintptr_t targets, uintptr_t temperature,
                                      float scalar_temperature, float softcap, int64_t ignore_index, bool with_entropy,
                                      int64_t num_rows, int64_t width, int64_t start, int64_t used) {
  fastppo::LogprobParams params;
  params.logits = logprob_rows(logits);
  params.dtype = static_cast<Dtype>(dtype);
  params.targets = pointer<const int64_t>(targets);
  params.temperature = pointer<const float>(temperature);
  params.scalar_temperature = scalar_temperature;
  params.softcap = softcap;
  params.ignore_index = ignore_index;
  params.with_entropy = with_entropy;
  params.num_rows = num_rows;
  params.width = width;
  params.start = start;
  params.used = used;
  return params;
}

void logprob_stats(const py::tuple& logits, int dtype, uintptr_t targets, uintptr_t temperature,
                   float scalar_temperature, float softcap, int64_t ignore_index, bool with_entropy, int64_t num_rows,
                   int64_t width, int64_t start, int64_t used, uintptr_t stats, int num_threads) {
  const fastppo::LogprobParams params = logprob_params(logits, dtype, targets, temperature, scalar_temperature, softcap,
                                                       ignore_index, with_entropy, num_rows, width, start, used);
  const py::gil_scoped_release no_gil;
  fastppo::logprob_stats_cpu(params, pointer<float>(stats), num_threads);
}

void logprob_combine(uintptr_t gathered, int64_t num_ranks, int64_t num_rows, uintptr_t targets, uintptr_t temperature,
                     float scalar_temperature, int64_t ignore_index, uintptr_t logprobs, uintptr_t entropy,
                     uintptr_t row) {
  fastppo::LogprobCombine params;
  params.gathered = pointer<const float>(gathered);
  params.num_ranks = num_ranks;
  params.num_rows = num_rows;
  params.targets = pointer<const int64_t>(targets);
  params.temperature = pointer<const float>(temperature);
  params.scalar_temperature = scalar_temperature;
  params.ignore_index = ignore_index;
  params.logprobs = pointer<float>(logprobs);
  params.entropy = pointer<float>(entropy);
  params.row = pointer<float>(row);
  const py::gil_scoped_release no_gil;
  fastppo::logprob_combine_cpu(params);
}

void logprob_dlogits(const py::tuple& logits, int dtype, uintptr_t targets, uintptr_t temperature,
                     float scalar_temperature, float softcap, int64_t ignore_index, bool with_entropy, int64_t num_rows,
                     int64_t width, int64_t start, int64_t used, const py::tuple& dlogits, uintptr_t row,
                     uintptr_t grad_logprobs, int64_t grad_logprobs_stride, uintptr_t grad_entropy,
                     int64_t grad_entropy_stride, int num_threads) {
  const fastppo::LogprobParams params = logprob_params(logits, dtype, targets, temperature, scalar_temperature, softcap,
                                                       ignore_index, with_entropy, num_rows, width, start, used);
  fastppo::LogprobGrads grads;
  grads.dlogits = logprob_rows(dlogits);
  grads.row = pointer<const float>(row);
  grads.grad_logprobs = pointer<const float>(grad_logprobs);
  grads.grad_logprobs_stride = grad_logprobs_stride;
  grads.grad_entropy = pointer<const float>(grad_entropy);
  grads.grad_entropy_stride = grad_entropy_stride;
  const py::gil_scoped_release no_gil;
  fastppo::logprob_dlogits_cpu(params, grads, num_threads);
}

void moments(uintptr_t x, uintptr_t mask, int64_t size, uintptr_t moments, int num_threads) {
  const fastppo::WhitenParams params{
      pointer<const float>(x), pointer<const int8_t>(mask), size, pointer<fastppo::Moments>(moments), nullptr, 0.0};
  const py::gil_scoped_release no_gil;
  fastppo::moments_cpu(params, num_threads);
}

void whiten(uintptr_t x, uintptr_t mask, int64_t size, uintptr_t moments, uintptr_t out, double eps, int num_threads,
            int device, uint64_t stream) {
  const fastppo::WhitenParams params{pointer<const float>(x),
                                     pointer<const int8_t>(mask),
                                     size,
                                     pointer<fastppo::Moments>(moments),
                                     pointer<float>(out),
                                     eps};
  const py::gil_scoped_release no_gil;
#ifdef FASTPPO_HAS_CUDA
  if (device >= 0) return fastppo::whiten_cuda(params, device, stream);
#else
  static_cast<void>(device);
  static_cast<void>(stream);
#endif
  fastppo::whiten_cpu(params, num_threads);
}

// (address, row stride, column stride, dtype code), or None.
fastppo::TokenTensor token_tensor(const py::object& x) {
  const GaeTensor fields = gae_tensor(x);
  return {fields.data, fields.row_stride, fields.time_stride, fields.dtype};
}

// (address, int64 or not, B), or None where the sequences are the rows or, with one row of T, unknown.
fastppo::TokenSequences token_sequences(const py::object& cu_seqlens, const fastppo::TokenShape& shape,
                                        bool rows_are_sequences) {
  if (cu_seqlens.is_none()) return {nullptr, false, rows_are_sequences ? shape.rows : 0, shape.cols};
  const py::tuple fields = cu_seqlens.cast<py::tuple>();
  return {pointer<const void>(fields[0].cast<uintptr_t>()), fields[1].cast<bool>(), fields[2].cast<int64_t>(),
          shape.cols};
}

void ppo_loss(int64_t rows, int64_t cols, const py::object& logprobs, const py::object& old_logprobs,
              const py::object& advantages, const py::object& mask, const py::object& entropy,
              const py::object& ref_logprobs, const py::object& rollout_logprobs, const py::object& nll_mask,
              const py::object& cu_seqlens, bool rows_are_sequences, int loss_type, int kl_type, bool kl_pathwise,
              int correction, int aggregation, double clip_low, double clip_high, double dual_clip, double sapo_tau,
              double sapo_tau_other, double ent_coef, double kl_coef, double is_low, double is_high, double nll_coef,
              double norm, double num_tokens, double num_seqs, double num_nll_tokens, uintptr_t grad,
              uintptr_t entropy_grad, uintptr_t nll_grad, uintptr_t loss, uintptr_t scale, uintptr_t nll_scale,
              uintptr_t metrics, int num_threads) {
  fastppo::PpoLossParams params;
  params.shape = {rows, cols};
  params.logprobs = token_tensor(logprobs);
  params.old_logprobs = token_tensor(old_logprobs);
  params.advantages = token_tensor(advantages);
  params.mask = token_tensor(mask);
  params.entropy = token_tensor(entropy);
  params.ref_logprobs = token_tensor(ref_logprobs);
  params.rollout_logprobs = token_tensor(rollout_logprobs);
  params.nll_mask = token_tensor(nll_mask);
  params.sequences = token_sequences(cu_seqlens, params.shape, rows_are_sequences);
  params.loss_type = static_cast<fastppo::LossType>(loss_type);
  params.kl_type = static_cast<fastppo::KlType>(kl_type);
  params.kl_pathwise = kl_pathwise;
  params.correction = static_cast<fastppo::Correction>(correction);
  params.normaliser = {static_cast<fastppo::Aggregation>(aggregation), num_tokens, num_seqs, norm};
  params.ratio_low = static_cast<float>(1 - clip_low);
  params.ratio_high = static_cast<float>(1 + clip_high);
  params.log_ratio_low = static_cast<float>(-clip_low);
  params.log_ratio_high = static_cast<float>(clip_high);
  params.dual_clip = static_cast<float>(dual_clip);
  params.sapo_tau[0] = static_cast<float>(sapo_tau);
  params.sapo_tau[1] = static_cast<float>(sapo_tau_other);
  params.ent_coef = ent_coef;
  params.kl_coef = kl_coef;
  params.is_bounds[0] = static_cast<float>(is_low);
  params.is_bounds[1] = static_cast<float>(is_high);
  params.nll_coef = nll_coef;
  params.num_nll_tokens = num_nll_tokens;
  params.grad = pointer<float>(grad);
  params.entropy_grad = pointer<float>(entropy_grad);
  params.nll_grad = pointer<float>(nll_grad);
  params.loss = pointer<float>(loss);
  params.scale = pointer<float>(scale);
  params.nll_scale = pointer<float>(nll_scale);
  params.metrics = pointer<double>(metrics);
  const py::gil_scoped_release no_gil;
  fastppo::ppo_loss_cpu(params, num_threads);
}

void value_loss(int64_t rows, int64_t cols, const py::object& values, const py::object& old_values,
                const py::object& returns, const py::object& mask, const py::object& cu_seqlens,
                bool rows_are_sequences, int aggregation, double clip_eps, double norm, double num_tokens,
                double num_seqs, uintptr_t grad, uintptr_t loss, uintptr_t scale, uintptr_t metrics, int num_threads) {
  fastppo::ValueLossParams params;
  params.shape = {rows, cols};
  params.values = token_tensor(values);
  params.old_values = token_tensor(old_values);
  params.returns = token_tensor(returns);
  params.mask = token_tensor(mask);
  params.sequences = token_sequences(cu_seqlens, params.shape, rows_are_sequences);
  params.normaliser = {static_cast<fastppo::Aggregation>(aggregation), num_tokens, num_seqs, norm};
  params.clip_eps = static_cast<float>(clip_eps);
  params.grad = pointer<float>(grad);
  params.loss = pointer<float>(loss);
  params.scale = pointer<float>(scale);
  params.metrics = pointer<double>(metrics);
  const py::gil_scoped_release no_gil;
  fastppo::value_loss_cpu(params, num_threads);
}

void loss_grad(uintptr_t kept, uintptr_t nll_kept, uintptr_t factor, uintptr_t nll_factor, uintptr_t grad, int dtype,
               int64_t tokens, int num_threads) {
  fastppo::LossGradParams params;
  params.kept = pointer<const float>(kept);
  params.nll_kept = pointer<const float>(nll_kept);
  params.factor = *pointer<const float>(factor);
  params.nll_factor = nll_factor == 0 ? 0.0f : *pointer<const float>(nll_factor);
  params.grad = pointer<void>(grad);
  params.dtype = static_cast<Dtype>(dtype);
  params.tokens = tokens;
  const py::gil_scoped_release no_gil;
  fastppo::loss_grad_cpu(params, num_threads);
}

#ifdef FASTPPO_HAS_SM90
// Of hidden and weight: (address, stride of rows).
fastppo::HeadProduct head_product(const py::tuple& hidden, const py::tuple& weight, int64_t num_rows,
                                  int64_t num_columns, int64_t width, int dtype, bool round) {
  return fastppo::HeadProduct{pointer<const void>(hidden[0].cast<uintptr_t>()),
                              pointer<const void>(weight[0].cast<uintptr_t>()),
                              num_rows,
                              num_columns,
                              width,
                              hidden[1].cast<int64_t>(),
                              weight[1].cast<int64_t>(),
                              static_cast<Dtype>(dtype),
                              round};
}

void head_stats(const py::tuple& hidden, const py::tuple& weight, int64_t num_rows, int64_t num_columns, int64_t width,
                int dtype, bool round, uintptr_t targets, uintptr_t temperature, float scalar_temperature,
                int64_t start, uintptr_t stats, uintptr_t scratch, bool with_entropy, int device, uint64_t stream) {
  const fastppo::HeadStats params{head_product(hidden, weight, num_rows, num_columns, width, dtype, round),
                                  pointer<const int64_t>(targets),
                                  pointer<const float>(temperature),
                                  scalar_temperature,
                                  start,
                                  pointer<float>(stats),
                                  pointer<float>(scratch),
                                  with_entropy};
  const py::gil_scoped_release no_gil;
  fastppo::head_stats_sm90(params, device, stream);
}

void head_gradient(uintptr_t targets, uintptr_t temperature, float scalar_temperature, uintptr_t kept,
                   uintptr_t upstream, int64_t ignore_index, int64_t start, int64_t num_columns, int64_t num_rows,
                   uintptr_t coefficients, int device, uint64_t stream) {
  const fastppo::HeadGradient params{pointer<const int64_t>(targets),
                                     pointer<const float>(temperature),
                                     scalar_temperature,
                                     pointer<const float>(kept),
                                     pointer<const float>(upstream),
                                     ignore_index,
                                     start,
                                     num_columns,
                                     num_rows,
                                     pointer<float>(coefficients)};
  const py::gil_scoped_release no_gil;
  fastppo::head_gradient_sm90(params, device, stream);
}

void head_dlogits(const py::tuple& hidden, const py::tuple& weight, int64_t num_rows, int64_t num_columns,
                  int64_t width, int dtype, bool round, int64_t first_column, uintptr_t coefficients,
                  const py::tuple& dlogits, int device, uint64_t stream) {
  const fastppo::HeadDlogits params{head_product(hidden, weight, num_rows, num_columns, width, dtype, round),
                                    first_column, pointer<const float>(coefficients),
                                    pointer<void>(dlogits[0].cast<uintptr_t>()), dlogits[1].cast<int64_t>()};
  const py::gil_scoped_release no_gil;
  fastppo::head_dlogits_sm90(params, device, stream);
}
#endif

// Why the kernels of the output head cannot run on `device`; empty where they can.
std::string head_problem(int device) {
#ifdef FASTPPO_HAS_SM90
  return fastppo::head_sm90_problem(device);
#else
  static_cast<void>(device);
  return std::string(FASTPPO_NO_CUDA_REASON).empty() ? "built without sm_90a" : FASTPPO_NO_CUDA_REASON;
#endif
}

// Why this module's CUDA kernels cannot run on `device`; empty where they can.
std::string cuda_problem(int device) {
#ifdef FASTPPO_HAS_CUDA
  return fastppo::gae_cuda_problem(device);
#else
  static_cast<void>(device);
  return FASTPPO_NO_CUDA_REASON;
#endif
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The compiled kernels of fastppo.";
  m.attr("csrc_hash") = FASTPPO_CSRC_HASH;
  m.attr("cuda_archs") = FASTPPO_CUDA_ARCHS;
  m.def("cpu_isa", [] { return fastppo::cpu_isa_name(fastppo::cpu_isa()); });
  m.def("cuda_problem", &cuda_problem, py::arg("device"));
  m.def("head_problem", &head_problem, py::arg("device"));
#ifdef FASTPPO_HAS_SM90
  m.def("head_stats", &head_stats);
  m.def("head_gradient", &head_gradient);
  m.def("head_dlogits", &head_dlogits);
#endif
  m.def("logprob_stats", &logprob_stats);
  m.def("logprob_combine", &logprob_combine);
  m.def("logprob_dlogits", &logprob_dlogits);
  m.def("gae", &gae, py::arg("rewards"), py::arg("values"), py::arg("mask"), py::arg("terminated"),
        py::arg("truncated"), py::arg("bootstrap_values"), py::arg("final_values"), py::arg("lam_per_seq"),
        py::arg("lam_returns_per_seq"), py::arg("cu_seqlens"), py::arg("cu_seqlens_int64"), py::arg("advantages"),
        py::arg("returns"), py::arg("out_row_stride"), py::arg("out_time_stride"), py::arg("num_seqs"),
        py::arg("num_steps"), py::arg("gamma"), py::arg("lam"), py::arg("lam_returns"), py::arg("separate_returns"),
        py::arg("scratch"), py::arg("moments"), py::arg("num_threads"), py::arg("device"), py::arg("stream"));
#ifdef FASTPPO_HAS_CUDA
  m.def("gae_scratch", &fastppo::gae_cuda_scratch, py::arg("num_seqs"), py::arg("num_steps"), py::arg("packed"),
        py::arg("time_major"), py::arg("separate_returns"), py::arg("moments"));
#endif
  m.def("moments", &moments, py::arg("x"), py::arg("mask"), py::arg("size"), py::arg("moments"),
        py::arg("num_threads"));
  m.def("whiten", &whiten, py::arg("x"), py::arg("mask"), py::arg("size"), py::arg("moments"), py::arg("out"),
        py::arg("eps"), py::arg("num_threads"), py::arg("device"), py::arg("stream"));
  m.def("ppo_loss", &ppo_loss, py::arg("rows"), py::arg("cols"), py::arg("logprobs"), py::arg("old_logprobs"),
        py::arg("advantages"), py::arg("mask"), py::arg("entropy"), py::arg("ref_logprobs"),
        py::arg("rollout_logprobs"), py::arg("nll_mask"), py::arg("cu_seqlens"), py::arg("rows_are_sequences"),
        py::arg("loss_type"), py::arg("kl_type"), py::arg("kl_pathwise"), py::arg("correction"), py::arg("aggregation"),
        py::arg("clip_low"), py::arg("clip_high"), py::arg("dual_clip"), py::arg("sapo_tau"), py::arg("sapo_tau_other"),
        py::arg("ent_coef"), py::arg("kl_coef"), py::arg("is_low"), py::arg("is_high"), py::arg("nll_coef"),
        py::arg("norm"), py::arg("num_tokens"), py::arg("num_seqs"), py::arg("num_nll_tokens"), py::arg("grad"),
        py::arg("entropy_grad"), py::arg("nll_grad"), py::arg("loss"), py::arg("scale"), py::arg("nll_scale"),
        py::arg("metrics"), py::arg("num_threads"));
  m.def("value_loss", &value_loss, py::arg("rows"), py::arg("cols"), py::arg("values"), py::arg("old_values"),
        py::arg("returns"), py::arg("mask"), py::arg("cu_seqlens"), py::arg("rows_are_sequences"),
        py::arg("aggregation"), py::arg("clip_eps"), py::arg("norm"), py::arg("num_tokens"), py::arg("num_seqs"),
        py::arg("grad"), py::arg("loss"), py::arg("scale"), py::arg("metrics"), py::arg("num_threads"));
  m.def("loss_grad", &loss_grad, py::arg("kept"), py::arg("nll_kept"), py::arg("factor"), py::arg("nll_factor"),
        py::arg("grad"), py::arg("dtype"), py::arg("tokens"), py::arg("num_threads"));
}
