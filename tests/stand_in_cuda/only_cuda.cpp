// Kernels that torch has for CUDA only, put together from others.

#include <ATen/AccumulateType.h>
#include <torch/extension.h>

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

Tensor or_zeros(const Maybe& given, const Tensor& like) {
    return given && given->defined() ? *given : at::zeros_like(like);
}

// They compute in float32 what is narrower.
Tensor wide(const Tensor& it) {
    return it.to(at::toAccumulateType(it.scalar_type(), /*is_cuda=*/true));
}

std::vector<Tensor> gates_of(const Tensor& gates, const Maybe& bias, int64_t count) {
    bool has_bias = bias && bias->defined();
    return (has_bias ? wide(gates) + wide(*bias) : wide(gates)).chunk(count, 1);
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& cx,
    const Maybe& input_bias, const Maybe& hidden_bias
) {
    auto a = gates_of(from_input, input_bias, 4), b = gates_of(from_hidden, hidden_bias, 4);
    auto in = (a[0] + b[0]).sigmoid(), forget = (a[1] + b[1]).sigmoid();
    auto cell = (a[2] + b[2]).tanh(), out = (a[3] + b[3]).sigmoid();
    auto cy = forget * wide(cx) + in * cell;
    auto saved = at::cat({in, forget, cell, out}, 1), hy = out * cy.tanh();
    auto dtype = cx.scalar_type();
    return {hy.to(dtype), cy.to(dtype), saved.to(dtype)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const Maybe& grad_hy, const Maybe& grad_cy, const Tensor& cx, const Tensor& cy,
    const Tensor& saved, bool has_bias
) {
    if (!(grad_hy && grad_hy->defined()) && !(grad_cy && grad_cy->defined())) return {};
    auto gates = wide(saved).chunk(4, 1);
    auto in = gates[0], forget = gates[1], cell = gates[2], out = gates[3];
    auto hy = wide(or_zeros(grad_hy, cx)), tanh = wide(cy).tanh();
    auto of_cy = hy * out * (1 - tanh * tanh) + wide(or_zeros(grad_cy, cx));
    auto grad = at::cat({
        of_cy * cell * (1 - in) * in,
        of_cy * wide(cx) * (1 - forget) * forget,
        of_cy * in * (1 - cell * cell),
        hy * tanh * (1 - out) * out,
    }, 1).to(saved.scalar_type());
    auto of_bias = has_bias ? grad.sum(0) : Tensor();
    return {grad, (of_cy * forget).to(cx.scalar_type()), of_bias};
}

std::tuple<Tensor, Tensor> gru_cell(
    const Tensor& from_input, const Tensor& from_hidden, const Tensor& hx,
    const Maybe& input_bias, const Maybe& hidden_bias
) {
    auto a = gates_of(from_input, input_bias, 3), b = gates_of(from_hidden, hidden_bias, 3);
    auto reset = (a[0] + b[0]).sigmoid(), in = (a[1] + b[1]).sigmoid();
    auto made = (a[2] + reset * b[2]).tanh(), before = wide(hx);
    auto hy = made + in * (before - made);
    auto saved = at::cat({reset, in, made, before, b[2]}, 1);
    return {hy.to(hx.scalar_type()), saved.to(hx.scalar_type())};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(
    const Tensor& grad_hy, const Tensor& saved, bool has_bias
) {
    auto parts = wide(saved).chunk(5, 1);
    auto reset = parts[0], in = parts[1], made = parts[2];
    auto grad = wide(grad_hy);
    auto of_in = grad * (parts[3] - made) * (1 - in) * in;
    auto of_made = grad * (1 - in) * (1 - made * made);
    auto of_reset = of_made * parts[4] * (1 - reset) * reset;
    auto dtype = grad_hy.scalar_type();
    auto input = at::cat({of_reset, of_in, of_made}, 1).to(dtype);
    auto hidden = at::cat({of_reset, of_in, of_made * reset}, 1).to(dtype);
    auto of_hx = (grad * in).to(dtype);
    if (!has_bias) return {input, hidden, of_hx, Tensor(), Tensor()};
    return {input, hidden, of_hx, input.sum(0), hidden.sum(0)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(
    const Tensor& grad_out, const Tensor& x, at::IntArrayRef shape, const Tensor& rstd,
    const Maybe& weight, std::array<bool, 2> asked
) {
    std::vector<int64_t> normalized, others;
    for (int64_t axis = 0; axis < x.dim(); ++axis)
        (axis < x.dim() - int64_t(shape.size()) ? others : normalized).push_back(axis);
    auto unit = wide(x) * wide(rstd), grad = wide(grad_out);
    bool has_weight = weight && weight->defined();
    auto of_unit = has_weight ? grad * wide(*weight) : grad;
    auto along = (of_unit * unit).mean(normalized, /*keepdim=*/true);
    auto of_x = wide(rstd) * (of_unit - unit * along);
    auto of_weight = others.empty() ? grad * unit : (grad * unit).sum(others);
    return {
        asked[0] ? of_x.to(x.scalar_type()) : Tensor(),
        asked[1] && has_weight ? of_weight.to(weight->scalar_type()) : Tensor(),
    };
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("_thnn_fused_lstm_cell", lstm_cell);
    library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
    library.impl("_thnn_fused_gru_cell", gru_cell);
    library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
    library.impl("_fused_rms_norm_backward", rms_norm_backward);
}
