"""What torch refuses to do with a tensor that requires grad, outside of any pass."""

import ast
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType, ModuleType

from torch import Tensor

from gradlib.vjp.diagnosis import Diagnosis
from gradlib.vjp.source import tree_of, value_of
from gradlib.vjp.spelling import LONGEST
from gradlib.vjp.tensor_names import is_of, name_of
from gradlib.vjp.tracebacks import steps_of


def leaf_changed(error: BaseException) -> Diagnosis:
    """Say what to do instead of changing a leaf in place."""
    statement = _statement(error)
    name = _changed_by(statement, error)
    line = ast.unparse(statement) if statement is not None and name else "w -= step"
    place = f"`{name}`" if name else "A tensor"
    which = "a view of a leaf" if str(error).startswith("a view") else "a leaf"
    return Diagnosis(
        "GL112",
        f"{place} is changed in place, and is {which} that requires grad.",
        intent="A step of an optimizer, or first values: under torch.no_grad(). In the "
        "middle of a computation: change a clone().",
        fix=f"with torch.no_grad():\n    {line}",
        rule="A leaf is where a gradient ends up, in .grad. A change that autograd "
        "records would make it a result, which is no leaf.",
    )


def numpy_refused(error: BaseException) -> Diagnosis:
    """Say what to do instead of giving NumPy a tensor that requires grad."""
    name = _converted(error)
    place = f"`{name}`" if name else "A tensor"
    return Diagnosis(
        "GL108",
        f"{place} requires grad, and an array of NumPy has no graph.",
        intent="To look at the numbers or to plot them, detach() first; of a list of "
        "losses, append(loss.item()). Where a gradient has to flow back, compute with "
        "functions of torch.",
        fix=f"{name or 'y'}.detach().numpy()",
        rule="Gradients flow back through a graph, and what is computed from an array "
        "has none.",
    )


def _frames(error: BaseException) -> Sequence[tuple[FrameType, int]]:
    """Return the frames outside torch and installed packages, with their lines."""
    steps = ((it.tb_frame, it.tb_lineno) for it in steps_of(error))
    return [it for it in steps if not _is_of_a_package(it[0])]


def _is_of_a_package(frame: FrameType) -> bool:
    return is_of(frame, "torch") or "site-packages" in frame.f_code.co_filename


def _statement(error: BaseException) -> ast.stmt | None:
    """Return the innermost statement that failed, if it is short and can be read."""
    with suppress(Exception):  # there may be no source
        frame, line = _frames(error)[0]
        every = (it for it in ast.walk(tree_of(frame)) if isinstance(it, ast.stmt))
        (*_, found) = (it for it in every if it.lineno <= line <= (it.end_lineno or 0))
        return found if len(ast.unparse(found)) <= LONGEST else None
    return None


def _changed_by(statement: ast.stmt | None, error: BaseException) -> str:
    """Return what a statement changes in place, or ``""``."""
    match statement:
        case ast.AugAssign(target=changed) | ast.Assign(targets=[changed]):
            pass
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=changed), args=args)):
            frame, _ = _frames(error)[0]
            if isinstance(value_of(changed, frame), ModuleType):
                changed = args[0]  # the function's argument, as in nn.functional
        case _:
            return ""
    return ast.unparse(changed)


def _converted(error: BaseException) -> str:
    """Return the name of the tensor that NumPy was given, or ``""``."""
    frames = [frame for frame, _ in _frames(error)]
    for step in steps_of(error)[:1]:
        tensor = step.tb_frame.f_locals.get("self")
        if isinstance(tensor, Tensor):  # in its __array__
            return name_of(tensor, frames)
    statement = _statement(error)
    for it in ast.walk(statement) if statement is not None else ():
        match it:
            case ast.Call(func=ast.Attribute(value=value, attr="numpy")):
                text = ast.unparse(value)
                return f"({text})" if isinstance(value, ast.BinOp) else text
            case _:
                pass
    return ""
