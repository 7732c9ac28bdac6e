"""What stands around the functions in torch_npu: its modules, and those of packages beside it."""
