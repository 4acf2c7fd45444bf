"""What gradlib uses of torch that torch does not document, functions above all.

What is read of a single tensor, node or module stands where it is read. Each was there
in torch 2.8 and in every release since, to torch 2.15, or is looked for.
"""
