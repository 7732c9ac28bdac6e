"""The device "npu" of torch: a registered device, or another name of the computing device."""
