"""The undocumented parts of torch that gradlib uses, mostly functions.

Attributes of a single tensor, node or module are read where they are needed instead.
Each part is there in every release from torch 2.8 to torch 2.15, or is looked for.
"""
