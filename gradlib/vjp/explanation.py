"""What `explain_vjp` returns: one call of torch.autograd.grad, taken apart."""

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from torch import Tensor

from gradlib.private.compiling import as_written
from gradlib.render import STYLE
from gradlib.vjp.equation import equation
from gradlib.vjp.meaning import headline
from gradlib.vjp.product import Jacobian, Product
from gradlib.vjp.tables import tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class VJPExplanation:
    """One call of ``torch.autograd.grad``, taken apart into v, J and vᵀJ.

    An attribute with a value for each input is a tuple if several inputs were given,
    and a dict if a dict was. One with a value for each pair of an output and an input
    is built likewise, within a tuple over the outputs if several were given.

    Attributes:
        ok: Whether autograd can make the call. If not, only `code` and `meaning` are
            set; the others are ``None`` or empty.
        code: What is wrong with the call, such as ``"GL101"``, or ``""``.
        meaning: What the call computed, in words, or what is wrong with it.
        result: vᵀJ for each input, of the input's shape, as autograd computed it.
        jacobian: J = dy/dx for each pair, of shape ``(*out, *in)``. Like `result`, it
            has no graph. ``None`` if there is none; `note` says why.
        equation: The equation for each pair, such as ``"jk,jki->i"``:
            ``torch.einsum(equation, v, J)``, summed over the outputs, is `result`.
            ``None`` for a complex output.
        shapes: A dict for each pair, of the shapes of ``"grad_output"``, ``"jacobian"``
            and ``"result"``; ``None`` for a nested tensor.
        by_einsum: vᵀJ for each input again, computed from `jacobian` by `equation`.
        difference: The largest difference between `result` and `by_einsum`, over the
            entries whose terms are finite; ``None`` if there is none. The printed
            explanation counts the others that differ.
        note: Why there is no `jacobian`, or ``""``.
    """

    ok: bool
    code: str
    meaning: str
    result: Any = None
    jacobian: Any = None
    equation: Any = None
    shapes: Any = None
    by_einsum: Any = None
    difference: float | None = None
    note: str = ""
    _product: Product | None = None

    def __repr__(self) -> str:
        """Say whether autograd can make the call."""
        return f"<VJPExplanation: {'ok' if self.ok else self.code}>"

    @as_written
    def __str__(self) -> str:
        """Return the explanation as text."""
        if self._product is None:
            return f"[{self.code}] {self.meaning}"
        return "\n\n".join(table.text() for table in tables(self._product))

    @as_written
    def _repr_html_(self) -> str:
        if self._product is None:
            return f'{STYLE}<div class="gradlib"><pre>{escape(str(self))}</pre></div>'
        return "".join(table.html() for table in tables(self._product))

    def plot(self, ax: "Axes | None" = None) -> "Figure":
        """Draw v beside the rows of J, and vᵀJ below its columns.

        Rows and columns have the names that the call gives to the tensors, or else y
        and x.

        Args:
            ax: Where to draw; a new figure if left out.

        Returns:
            The figure drawn on. Where there is no Jacobian, it says why.

        Raises:
            RecordingArgumentError: `ax` is no Axes.
        """
        # Imported only here: matplotlib takes longer to import than all the rest.
        from gradlib.vjp.picture import draw

        what_is_wrong = self.meaning.split("\n\n")[0]
        why_not = self.note or f"[{self.code}] {what_is_wrong}"
        return draw(self._product, why_not, ax)


def explained(product: Product) -> VJPExplanation:
    """Explain a call that was made."""
    pairs = [[(v, result) for result in product.results] for v in product.v]
    jacobian = product.jacobian
    known = isinstance(jacobian, Jacobian)
    return VJPExplanation(
        ok=True,
        code="",
        meaning=headline(product),
        result=product.by_input(product.results),
        jacobian=product.by_pair(jacobian.blocks) if known else None,
        equation=product.by_pair([[equation(v, it) for v, it in row] for row in pairs]),
        shapes=product.by_pair([[_shapes(v, it) for v, it in row] for row in pairs]),
        by_einsum=product.by_input(jacobian.contracted) if known else None,
        difference=jacobian.difference if known and jacobian.compares else None,
        note="" if known else jacobian,
        _product=product,
    )


def _shapes(v: Tensor, result: Tensor) -> dict[str, tuple[int, ...]] | None:
    if v.is_nested or result.is_nested:
        return None  # their sizes are not numbers, or not available
    return {
        "grad_output": tuple(v.shape),
        "jacobian": (*v.shape, *result.shape),
        "result": tuple(result.shape),
    }
