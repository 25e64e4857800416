"""Records of plans whose processes are on several nodes: each process runs this file, with RANK and so on set.

    python -m tests.support.records_over_nodes JOBS

JOBS is a pickle of pairs (file, recipe); rank 0 writes the record of each recipe into its file.
"""

import os
import pickle
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dtgpt.compare.torch_private import forget_meshes
from tests.support.runs import record


def main(jobs: Path) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = timedelta(seconds=120)
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world, is_master=rank == 0, timeout=limit)
    for file, recipe in pickle.loads(jobs.read_bytes()):
        own = dist.PrefixStore(str(file), store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=world, timeout=limit)
        result = record(recipe, recipe.steps)
        if rank == 0:
            Path(file).write_bytes(pickle.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
        forget_meshes()
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < world:  # the store ends with rank 0
        time.sleep(0.05)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
