import torch

layer = torch.nn.Linear(3, 2)
layer.register_backward_hook(print)
layer.register_full_backward_hook(print)
