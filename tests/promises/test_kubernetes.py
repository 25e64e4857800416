"""recipes/pytorchjob.yaml: the fields of Kubeflow's PyTorchJob, and the command that torchrun makes of it."""

from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from dtgpt.train.start import load_recipe

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]

# Of the resource definition kubeflow.org_pytorchjobs.yaml (training operator 1.9): what a section may hold, by kind.
FIELDS = {
    "": {"apiVersion": str, "kind": str, "metadata": dict, "spec": dict},
    "spec": {"elasticPolicy": dict, "nprocPerNode": str, "pytorchReplicaSpecs": dict, "runPolicy": dict},
    "spec.elasticPolicy": {
        "maxReplicas": int, "maxRestarts": int, "metrics": list, "minReplicas": int, "rdzvBackend": str,
        "rdzvConf": list, "rdzvHost": str, "rdzvId": str, "rdzvPort": int, "standalone": bool,
    },
    "spec.runPolicy": {
        "activeDeadlineSeconds": int, "backoffLimit": int, "cleanPodPolicy": str, "managedBy": str,
        "schedulingPolicy": dict, "suspend": bool, "ttlSecondsAfterFinished": int,
    },
    "spec.pytorchReplicaSpecs": {"Master": dict, "Worker": dict},
    "spec.pytorchReplicaSpecs.Worker": {"replicas": int, "restartPolicy": str, "template": dict},
}  # fmt: skip


@pytest.fixture(scope="module")
def job() -> dict:
    return yaml.safe_load((ROOT / "recipes" / "pytorchjob.yaml").read_text())


def section(job: dict, name: str) -> dict:
    for part in filter(None, name.split(".")):
        job = job[part]
    return job


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_is_one_of_the_resource_definition(job, name):
    for field, value in section(job, name).items():
        assert isinstance(value, FIELDS[name][field]), f"{name}.{field}"


def test_the_operator_finds_what_it_looks_for(job):
    worker = section(job, "spec.pytorchReplicaSpecs.Worker")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert worker["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    assert section(job, "spec.runPolicy")["cleanPodPolicy"] in ("All", "Running", "None")
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch" and container["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_torchrun_starts_the_recipe_in_each_pod(job, monkeypatch):
    """With the variables that the operator sets."""
    policy, worker = section(job, "spec.elasticPolicy"), section(job, "spec.pytorchReplicaSpecs.Worker")
    (container,) = worker["template"]["spec"]["containers"]
    variables = {
        "RDZV_ENDPOINT": f"{job['metadata']['name']}-worker-0:23456", "RDZV_BACKEND": policy["rdzvBackend"],
        "RDZV_ID": policy["rdzvId"], "NNODES": worker["replicas"], "MAX_RESTARTS": policy["maxRestarts"],
        "NPROC_PER_NODE": job["spec"]["nprocPerNode"],
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", str(value))
    assert container["command"] == ["torchrun"]
    started = get_args_parser().parse_args(container["args"])
    assert (started.nnodes, started.nproc_per_node, started.max_restarts) == ("2", "8", 100)
    assert (started.rdzv_backend, started.rdzv_endpoint, started.rdzv_id) == ("c10d", "dtgpt-worker-0:23456", "dtgpt")
    recipe = load_recipe(ROOT / started.training_script, started.training_script_args)
    assert (recipe.plan, recipe.resume, recipe.checkpoint.minutes) == ("dp", "auto", 10)
