"""The names of contenders in the results, and of numbers of threads."""

NONE = "no hooks"
BY_HAND = "tensor hooks by hand"
FULL = "full backward hooks by hand"

OURS = "gradlib"
OURS_STATISTICS = f"{OURS}, tensor_stats"
OURS_CHECKED = f"{OURS}, checked"
OURS_OUT = f"{OURS}, out="
OURS_IN_A_FUNCTION = f"{OURS}, in a function"
OURS_IN_OTHER_CODE = f"{OURS}, in other code"
OURS_IN_OTHER_CODE_CHECKED = f"{OURS_IN_OTHER_CODE}, checked"
OURS_IN_A_LOSS = f"{OURS}, in a loss"

LOOP = "loop over outputs"
BATCHED = "is_grads_batched"
JACREV = "vmap(jacrev)"
JACFWD = "vmap(jacfwd)"
JACREV_OF_SUM = "jacrev of the sum"
REPLICATED = "replicate"
UNIT_JVPS = "jvp with unit vectors"


def counted_threads(number: int) -> str:
    """Return a number of threads in words."""
    return "1 thread" if number == 1 else f"{number} threads"
