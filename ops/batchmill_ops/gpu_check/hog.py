"""Holds a GPU's memory until its stdin closes: ``python -m batchmill_ops.gpu_check.hog MIB_LEFT`` leaves so much free."""

from __future__ import annotations

import sys


def main(left_mib: int) -> None:
    import torch

    held = []
    while (free := torch.cuda.mem_get_info()[0] - (left_mib << 20)) > 64 << 20:
        held.append(torch.empty(min(free, 1 << 30), dtype=torch.uint8, device="cuda"))
    sys.stdout.write("holding\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.argv[1]))
