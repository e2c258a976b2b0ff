"""The configurations that we ship say what our own command line, and Ray's, understand."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import Parser
from gateway.cli.serve import add_parser, configuration
from gateway.config import GatewayConfig

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
ENDING_S = 20  # what ranks and what they run on may take after the drain


def gateway_config(words: list[str]) -> GatewayConfig:
    parser = Parser(prog="gateway")
    add_parser(parser.add_subparsers(parser_class=Parser))
    return configuration(vars(parser.parse_args(words)), {})


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    spec = document["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]] if document["kind"] == "RayCluster" else [spec]
    return [group["template"]["spec"] for group in groups if "template" in group]


def serving_pods(name: str) -> list[tuple[dict[str, Any], dict[str, Any], GatewayConfig]]:
    """Pods that run the gateway: their spec, the container, and what it is told."""
    found = []
    for document in yaml.safe_load_all((CONFIGS / "kubernetes" / name).read_text()):
        for pod in pods(document) if document["kind"] in ("RayCluster", "Deployment") else []:
            for container in pod["containers"]:
                text = shlex.join(container["command"] + container["args"])
                if container["command"][0] == "/bin/bash":
                    text = "\n".join(container["args"])
                if match := re.search(r"gateway serve.*", text):
                    found.append((pod, container, gateway_config(shlex.split(match[0])[1:])))
    return found


@pytest.mark.parametrize("name", ["raycluster.yaml", "deployment.yaml"])
def test_pods_are_probed_where_we_answer_and_have_time_to_drain(name: str) -> None:
    ((pod, container, config),) = serving_pods(name)
    paths = {probe: container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert paths == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/live"}
    assert [port["containerPort"] for port in container["ports"]] == [config.server.port]
    assert config.server.host == "0.0.0.0"
    word, pre_stop_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert word == "sleep"
    assert pod["terminationGracePeriodSeconds"] >= int(pre_stop_s) + config.server.shutdown_timeout + ENDING_S
    probe = container["startupProbe"]
    assert config.fault.engine_ready_timeout <= probe["periodSeconds"] * probe["failureThreshold"]


def test_the_ray_cluster_has_workers_for_all_ranks_and_none_in_its_head() -> None:
    ((_, _, config),) = serving_pods("raycluster.yaml")
    documents = yaml.safe_load_all((CONFIGS / "kubernetes/raycluster.yaml").read_text())
    (cluster,) = [document for document in documents if document["kind"] == "RayCluster"]
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    gpus = int(workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    assert workers["replicas"] * gpus == config.parallel.data_parallel_size
    assert cluster["spec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_ray_up_takes_the_cluster_file() -> None:
    util = pytest.importorskip("ray.autoscaler._private.util")
    config = yaml.safe_load((CONFIGS / "cluster-ray.yaml").read_text())
    util.validate_config(util.prepare_config(config))
    assert "--num-cpus=0" in config["head_start_ray_commands"][-1]


def test_commands_of_the_guide_are_understood() -> None:
    text = (CONFIGS.parent / "docs" / "cluster.md").read_text()
    commands = re.findall(r"gateway serve (/models/[^\n'#]*)", text)
    assert len(commands) >= 2
    for command in commands:
        assert gateway_config(["serve", *shlex.split(command)]).parallel.ray_address is not None
