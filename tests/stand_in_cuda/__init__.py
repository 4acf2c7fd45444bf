"""A stand-in for CUDA: two devices in the memory of the CPU, for builds without it.

To torch they are CUDA devices. Tensors have the dispatch keys of CUDA, so that each
operation takes the way that it takes on a GPU; each device has its thread in the
backward pass, its memory, which can run out, and its own tensors, which no operation
mixes with those of another. Graphs are captured and replayed. A copy to pinned memory
holds wrong numbers until somebody waits, and whoever waits can be refused, by
``torch.cuda.set_sync_debug_mode("error")`` and while a graph is captured.

So it shows where the package waits or mixes devices, reads what has not arrived,
captures what cannot be captured, or takes another way for tensors of a GPU and errs
there.

It cannot show what a GPU's kernels compute, as the CPU's compute here, how long
anything takes, or races: whatever a stream is given is done at once.
"""
