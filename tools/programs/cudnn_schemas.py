import torch

for schema in torch._C._jit_get_schemas_for_operator("aten::cudnn_convolution"):
    overload = getattr(schema, "overload_name", "")
    names = ", ".join(argument.name for argument in schema.arguments[:4])
    print(f"cudnn_convolution{overload and '.' + overload}({names}, ...)")
