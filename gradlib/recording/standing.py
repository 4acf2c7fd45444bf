"""Which modules of a model stand as they were last seen, and need not be set back."""

import sys
from collections.abc import Iterable, Mapping, Set

from torch import nn

from gradlib.private.hooks import hook_dicts
from gradlib.private.modules import own_buffers, own_children, own_parameters
from gradlib.recording.seen import Seen, are_as_kept


class Standing:
    """The modules of a model, each with the moment since which it is as it is now."""

    def __init__(
        self, seen: Mapping[nn.Module, Seen], modules: Iterable[nn.Module]
    ) -> None:
        """Compare modules with what was last seen of them.

        Args:
            seen: What is known of each.
            modules: All modules of the model.
        """
        # With the ids of what is kept of the weights and buffers.
        self._of: dict[nn.Module, tuple[int, frozenset[int]]] = {}
        for module in modules:
            known = seen.get(module)
            if known is None or not _stands(known, module):
                self._of[module] = sys.maxsize, frozenset()
            else:
                self._of[module] = known.last_change(), frozenset(map(id, known.kept()))

    def changed(self, moment: int, held: Set[int]) -> list[nn.Module]:
        """Return the modules that have changed since a moment, or share a tensor.

        Args:
            moment: The moment.
            held: The ids of what is kept of some weights and buffers.
        """
        return [
            module
            for module, (since, kept) in self._of.items()
            if moment < since or not kept.isdisjoint(held)
        ]


def _stands(seen: Seen, module: nn.Module) -> bool:
    """Tell whether a module is now as it was last seen.

    One with hooks, or with attributes that can change in place, counts as changed, and
    so does one on a GPU: a write through ``tensor.data`` leaves no sign there. So does
    one that was lazy: it had the handles of its hooks in attributes.
    """
    own = vars(module)
    return (
        all(it.tensor.is_cpu for it in seen.kept())
        and seen.training is own.get("training", False)
        and seen.hooks is None
        and not any(hook_dicts((module,)))
        and [*seen.children.items()] == [*own_children(module).items()]
        and seen.attributes.stand_in(own)
        and are_as_kept(own_parameters(module), seen.parameters)
        and are_as_kept(own_buffers(module), seen.buffers)
    )
