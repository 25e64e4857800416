"""Peak rates of GPUs, against which a run says how fast it is."""

import re

import torch

# Dense peak of 16-bit floats in FLOP/s by the vendors' data sheets, by words of the name that CUDA reports, as regular
# expressions; the first match counts.
PEAK_FLOPS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H800 PCIe": 756e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "A30": 165e12,
    "A10": 125e12,
    "L40S": 362e12,
    "L4": 121e12,
    "V100S": 130e12,
    "V100-PCIE": 112e12,
    "V100-SXM[23]": 125e12,
    "T4": 65e12,
    "RTX 4090": 165.2e12,
    "RTX 3090": 71e12,
}


def peak_of_name(name: str) -> float | None:
    if re.search(r"\b(Laptop|Ti|D|MIG)\b", name):  # other chips, or a part of one, under the same name
        return None
    return next((peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return dense FLOP/s at 16 bits, where they are known."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return None
    return peak_of_name(torch.cuda.get_device_name(device))
