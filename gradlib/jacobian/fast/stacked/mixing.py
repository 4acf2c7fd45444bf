"""The backward of operations that mix entries: products, norms and attention.

torch's kernels, where there are some, take the vectors as more samples. Saved tensors
are repeated for each vector where a kernel needs that.
"""

from collections.abc import Callable, Mapping, Set
from functools import partial

from torch import Tensor

from gradlib.jacobian.fast import moves
from gradlib.jacobian.fast.attention import Attention, read
from gradlib.jacobian.fast.kernels import INPUT_ALONE, aten
from gradlib.jacobian.fast.operation import FACTORS, Operation
from gradlib.jacobian.fast.slopes import of_ones
from gradlib.jacobian.fast.stacked.back import Back, Part, sum_to_shape

FEW_KEYS = 32
"""With at most this many keys, and no more than vectors, the vectors of attention are
an inner axis.

With torch 2.13 on a core of an AMD EPYC, 64 vectors took half the time so with 4 keys,
and a sixth more with 64; 8 vectors with 32 keys took a fifth more.
"""

WIDE = 32
"""With at least this many columns, one matrix for all samples is multiplied by each.

With torch 2.13 on a core of an Intel Xeon that took half the time for 4 to 64 rows, as
no axis has to be moved; with fewer columns, as many small products took up to five
times as long as a large one.
"""


def addmm(op: Operation) -> Back | None:
    """A matrix plus a product of two, or a batch of those."""
    left, right = map(op.saved, FACTORS[op.node.name()])
    ways = _ways(left, right, op.saved("alpha"))
    beta = op.saved("beta")
    plus: dict[int, Callable[[Tensor], Tensor]] = {}
    if 0 in op.shapes:
        shape = op.shapes[0]
        plus[0] = lambda grad: sum_to_shape(_scaled(grad, beta), shape)
    return _each(op, plus | {1 + i: way for i, way in ways.items()})


def mm(op: Operation) -> Back | None:
    """A product of two matrices, or of batches of them."""
    ways = _ways(op.saved("self"), op.saved("mat2"), 1)
    return _each(op, ways)


def _ways(
    left: Tensor | None, right: Tensor | None, scale: float
) -> dict[int, Callable[[Tensor], Tensor]]:
    """Return the ways back to the two factors of a product, by position."""
    ways: dict[int, Callable[[Tensor], Tensor]] = {}
    if right is not None:
        ways[0] = partial(_to_left, _one(right).mT, scale)
    if left is not None:
        ways[1] = partial(_to_right, _one(left).mT, scale)
    return ways


def _one(matrices: Tensor) -> Tensor:
    """Return the matrix that a batch repeats, or the batch if its matrices differ."""
    repeats = matrices.dim() == 3 and matrices.numel() and not matrices.stride(0)
    return matrices[0] if repeats else matrices


def _to_left(right: Tensor, scale: float, grad: Tensor) -> Tensor:
    if right.dim() == 2:
        return _scaled(grad.contiguous() @ right, scale)  # no axis has to be moved
    return _scaled(_times(_inside(grad), right), scale).movedim(-2, 0)


def _to_right(left: Tensor, scale: float, grad: Tensor) -> Tensor:
    if left.dim() == 2 and grad.dim() == 4 and grad.shape[-1] >= WIDE:
        return _scaled(left @ grad, scale)
    return _scaled(_times_of(left, _inside(grad)), scale).movedim(-2, 0)


def _each(op: Operation, ways: dict[int, Callable[[Tensor], Tensor]]) -> Back | None:
    """Return the backward to all inputs that count, if each of them has a way."""
    if not op.shapes.keys() <= ways.keys():
        return None
    return lambda grad: {i: ways[i](grad) for i in op.shapes}


def reduced(op: Operation) -> Back:
    """One number of several entries, as the largest or a norm: each has its slope."""
    slope = of_ones(op)[0]
    gone, _ = moves.reduced(op)
    kept = [1 if i in gone else size for i, size in enumerate(op.shapes[0])]
    return lambda grad: {0: grad.reshape(grad.size(0), *kept) * slope}


def cumsum(op: Operation) -> Back:
    """The sum of each entry and those before it."""
    dim = 1 + op.dim()
    return lambda grad: {0: grad.flip(dim).cumsum(dim).flip(dim)}


def softmax(op: Operation) -> Back:
    """A softmax."""
    p, dim = op.saved("result"), 1 + op.dim()

    def back(grad: Tensor) -> dict[int, Tensor | Part]:
        slope = grad * p
        return {0: slope.addcmul_(p, slope.sum(dim, keepdim=True), value=-1)}

    return back


def log_softmax(op: Operation) -> Back:
    """A log-softmax."""
    p, dim = op.saved("result").exp(), 1 + op.dim()
    return lambda grad: {0: grad.addcmul(p, grad.sum(dim, keepdim=True), value=-1)}


def layer_norm(op: Operation, *, plain: bool = False) -> Back | None:
    """A layer norm; if `plain`, without its weight."""
    if not is_of_input_alone(op):
        return None
    shape = list(op.saved("normalized_shape"))
    saved = op.saved("input"), op.saved("result1"), op.saved("result2")
    weight = None if plain else op.saved("weight")

    def back(grad: Tensor) -> dict[int, Tensor | Part]:
        x, mean, rstd = (_repeated(it, grad.size(0)) for it in saved)
        grads = aten.native_layer_norm_backward(
            grad.contiguous(), x, shape, mean, rstd, weight, None, INPUT_ALONE
        )
        return {0: grads[0]}

    return back


def rms_norm(op: Operation) -> Back | None:
    """An RMS norm."""
    if not is_of_input_alone(op):
        return None
    dims = [*range(-len(op.saved("normalized_shape")), 0)]
    rstd, weight = op.saved("result1"), op.saved("weight")
    normal = op.saved("input") * rstd

    def back(grad: Tensor) -> dict[int, Tensor | Part]:
        slope = grad if weight is None else grad * weight
        mean = (slope * normal).mean(dims, keepdim=True)
        return {0: (slope - normal * mean) * rstd}

    return back


def group_norm(op: Operation, *, plain: bool = False) -> Back | None:
    """A group norm, or a norm of each channel; if `plain`, without its weight."""
    if not is_of_input_alone(op):
        return None
    saved = op.saved("input"), op.saved("result1"), op.saved("result2")
    samples, *sizes = (int(op.saved(it)) for it in ("N", "C", "HxW", "group"))
    weight = None if plain else op.saved("weight")

    def back(grad: Tensor) -> dict[int, Tensor | Part]:
        count = grad.size(0)
        x, mean, rstd = (_repeated(it, count).flatten(0, 1) for it in saved)
        grads = aten.native_group_norm_backward(
            grad.flatten(0, 1).contiguous(),
            x,
            mean,
            rstd,
            weight,
            count * samples,
            *sizes,
            INPUT_ALONE,
        )
        return {0: grads[0].view(count, *op.shape)}

    return back


def attention(op: Operation) -> Back | None:
    """Attention, by its formula."""
    saved = read(op)
    if saved is None or not op.shapes.keys() <= {0, 1, 2}:
        return None
    p, keys, asked = saved.probabilities(), saved.key.shape[-2], op.shapes.keys()

    def back(grad: Tensor) -> Mapping[int, Tensor]:
        few = keys <= min(FEW_KEYS, grad.size(0))
        return (_vectors_inside if few else _vectors_outside)(saved, p, asked, grad)

    return back


def _vectors_inside(
    saved: Attention, p: Tensor, asked: Set[int], grad: Tensor
) -> dict[int, Tensor]:
    """Go back through attention with the vectors as an inner axis.

    Args:
        saved: The attention.
        p: Its probabilities.
        asked: The positions of the inputs that gradients go to.
        grad: The gradients of its output.
    """
    q, k, v = saved[:3]
    grad = _inside(grad).contiguous()
    grads: dict[int, Tensor] = {}
    if 0 in asked or 1 in asked:
        p_of_each = p.mT.unsqueeze(-1)
        slope = (v @ grad.flatten(-3, -2).mT).view(*p.mT.shape, grad.shape[-2])
        slope = slope.mul_(p_of_each * saved.scale)
        slope.addcmul_(p_of_each, slope.sum(-3, keepdim=True), value=-1)
        if 0 in asked:
            product = slope.flatten(-2).mT @ k
            grads[0] = product.view(*grad.shape[:-1], k.shape[-1])
        if 1 in asked:
            grads[1] = _times(slope.mT, q)
    if 2 in asked:
        grads[2] = _times_of(p.mT, grad)
    return {i: it.movedim(-2, 0) for i, it in grads.items()}


def _vectors_outside(
    saved: Attention, p: Tensor, asked: Set[int], grad: Tensor
) -> dict[int, Tensor]:
    """Do the same with the vectors before the axes of matrices."""
    q, k, v = saved[:3]
    grad = grad.movedim(0, -3)
    grads: dict[int, Tensor] = {}
    if 0 in asked or 1 in asked:
        p_of_each = p.unsqueeze(-3)
        slope = _times(grad, v.mT).mul_(p_of_each * saved.scale)
        slope.addcmul_(p_of_each, slope.sum(-1, keepdim=True), value=-1)
        if 0 in asked:
            grads[0] = _times(slope, k)
        if 1 in asked:
            grads[1] = _times(slope.mT, q)
    if 2 in asked:
        grads[2] = _times(grad.mT, p).mT
    return {i: it.movedim(-3, 0) for i, it in grads.items()}


def is_of_input_alone(op: Operation) -> bool:
    """Tell whether gradients go to the operation's first input alone, to no weight."""
    return [*op.shapes] == [0]


def _inside(grad: Tensor) -> Tensor:
    """Move the vectors after the rows of matrices, so that one product takes both."""
    return grad.movedim(0, -2)


def _times(grads: Tensor, matrix: Tensor) -> Tensor:
    """Multiply ``(*batch, n, vectors, m)`` by one matrix, ``(*batch, m, k)``.

    One product takes all vectors, without repeating the matrix. The vectors may also
    come before n.
    """
    product = grads.flatten(-3, -2) @ matrix
    return product.view(*grads.shape[:-1], product.shape[-1])


def _times_of(matrix: Tensor, grads: Tensor) -> Tensor:
    """Multiply one matrix, ``(*batch, k, n)``, by ``(*batch, n, vectors, m)``."""
    product = matrix @ grads.flatten(-2)
    return product.view(*product.shape[:-1], *grads.shape[-2:])


def _scaled(grad: Tensor, scale: float) -> Tensor:
    return grad if scale == 1 else grad * scale


def _repeated(saved: Tensor, count: int) -> Tensor:
    """Return a copy of a saved tensor for each vector, ``(vectors, *shape)``."""
    return saved.expand(count, *saved.shape).contiguous()
