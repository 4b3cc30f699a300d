#pragma once

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "op.h"

namespace gptkernels::GPTKERNELS_DEVICE {

Tensor linear_op(const Tensor& x, const Tensor& weight, const OptionalTensor& bias);
std::tuple<Tensor, Tensor, Tensor> linear_backward_op(const Tensor& dout, const Tensor& x, const Tensor& weight,
                                                      const std::vector<bool>& output_mask);

Tensor gelu_op(const Tensor& x, const std::string& approximate);
Tensor gelu_backward_op(const Tensor& dout, const Tensor& x, const std::string& approximate);

inline Tensor saved_or_recomputed(const Tensor& post_gelu, const Tensor& pre_gelu, const std::string& approximate) {
  return is_absent(post_gelu) ? gelu_op(pre_gelu, approximate) : post_gelu;
}

std::tuple<Tensor, Tensor, Tensor> mlp_op(const Tensor& x, const Tensor& fc_weight, const OptionalTensor& fc_bias,
                                          const Tensor& proj_weight, const OptionalTensor& proj_bias,
                                          bool keep_post_gelu);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> mlp_backward_op(const Tensor& dout, const Tensor& x,
                                                                   const Tensor& fc_weight, const Tensor& proj_weight,
                                                                   const Tensor& pre_gelu, const Tensor& post_gelu,
                                                                   const std::vector<bool>& output_mask);

// total_heads is by default num_heads.
std::tuple<Tensor, Tensor> attention_op(const Tensor& qkv, int64_t num_heads, std::optional<double> scale,
                                        double dropout_p, const OptionalTensor& seed, const OptionalTensor& offset,
                                        int64_t first_head = 0, std::optional<int64_t> total_heads = {});
Tensor attention_backward_op(const Tensor& dout, const Tensor& qkv, const Tensor& out, const Tensor& logsumexp,
                             int64_t num_heads, std::optional<double> scale, double dropout_p,
                             const OptionalTensor& seed, const OptionalTensor& offset, int64_t first_head = 0,
                             std::optional<int64_t> total_heads = {});

}  // namespace gptkernels::GPTKERNELS_DEVICE
