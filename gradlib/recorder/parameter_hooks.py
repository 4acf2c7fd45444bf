"""The hooks of parameters, and which parameters a call has."""

from torch import nn
from torch.nn.parameter import is_lazy

from gradlib.recorder.ends import end_of
from gradlib.recorder.frame import Frame
from gradlib.recorder.hooked import Hooked, Parameters
from gradlib.recorder.passes import Passes
from gradlib.recorder.tap import Tap
from gradlib.recording.flow import Grads
from gradlib.recording.trace import Block


class ParameterHooks:
    """Hooks the parameters of a block's modules, each once."""

    def __init__(self, block: Block, passes: Passes) -> None:
        """Begin with none.

        Args:
            block: What all calls have in common.
            passes: The backward passes of the block.
        """
        self._block = block
        self._passes = passes
        self._gathers = "param_grads" in block.fields
        # By the id of the parameter. As some are put in for one call only, none is held
        # here, so another may have got its id.
        self._taps: dict[int, Tap] = {}

    def take(self, frame: Frame, own: dict[str, nn.Parameter | None]) -> None:
        """Take the parameters that a module has in a call: some may be new.

        Args:
            frame: The call.
            own: The module's own parameters, by name.
        """
        call, hooked = frame.call, frame.hooked
        if not hooked.knows(own):
            history = self._block.history
            is_new = call.recomputed_in is None  # else its module was met before
            if history is not None and is_new and not hooked.has_seen(own):
                # Others than before, as functional_call() puts in.
                history.meet(hooked.module, call.moment)
            frame.lazy = self.meet(hooked, own)
        asked = hooked.parameters
        call.parameters = hooked.names
        for name, (parameter, _, grads) in hooked.parameters.items():
            if not parameter.requires_grad:
                call.idle = [*call.idle, name]
                asked = {key: it for key, it in asked.items() if key != name}
            elif not parameter.is_leaf:  # computed, as functional_call() may put in
                asked = {**asked, name: (parameter, end_of(parameter), grads)}
        if frame.gathers and self._gathers:
            frame.parameters = asked

    def take_anew(self, frame: Frame, own: dict[str, nn.Parameter | None]) -> None:
        """Take the parameters again: they have changed since the call began.

        Args:
            frame: The call.
            own: The module's own parameters, by name.
        """
        call = frame.call
        call.idle = [key for key in call.idle if isinstance(key, int)]
        self.take(frame, own)

    def meet(self, hooked: Hooked, own: dict[str, nn.Parameter | None]) -> bool:
        """Hook the parameters of a module; tell whether some are uninitialized.

        Args:
            hooked: The module.
            own: Its own parameters, by name.
        """
        parameters: Parameters = {}
        some_idle = some_lazy = False
        for name, parameter in own.items():
            if parameter is None:
                continue
            if is_lazy(parameter):
                some_lazy = True
                continue
            number, grads = id(parameter), Grads()
            known = self._taps.get(number)
            if known is not None and known.is_on(parameter):
                grads = known.grads
            elif not parameter.requires_grad:
                some_idle = True
            elif self._gathers:
                tap = self._passes.hook_parameter(parameter, grads)
                self._taps[number] = tap
            parameters[name] = parameter, number, grads
        hooked.remember(own, parameters, for_good=not (some_idle or some_lazy))
        return some_lazy
