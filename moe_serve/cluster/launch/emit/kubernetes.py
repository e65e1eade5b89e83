"""Writes manifests for Kubernetes: a LeaderWorkerSet, or a StatefulSet with a headless Service.

Both take their secrets from a Secret that is not emitted; the comment at the top of the file has
its name and the command that makes it. A Service for HTTP clients goes to node 0 alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

import yaml

from moe_serve.cluster.launch.deployment import Deployment
from moe_serve.cluster.launch.hosts import HostPort
from moe_serve.model.hub.hub_name import hub_name_of

KubernetesKind = Literal["leader-worker-set", "stateful-set"]
Manifest = dict[str, Any]

SECRET_KEY = "cluster-secret"  # key in the Secret: the secret of the control connections
API_KEYS_KEY = "api-keys"  # keys of HTTP clients, separated by commas
ADMIN_KEYS_KEY = "admin-keys"  # keys for /admin; optional
_USER = 10001  # the user of our images
_HUB_HOME = "/var/cache/moe-serve/huggingface"  # HF_HOME of our images
_PRE_STOP_S = 5  # until the Service has stopped sending requests
_NODE_0 = "moe-serve/node-0"
_HEADER = """\
# {name} on {num_nodes} nodes. Create the secrets first, once:
#
#     kubectl create secret generic {name} \\
#       --from-literal={secret}="$(openssl rand -hex 32)" --from-literal={keys}=KEY,KEY \\
#       --from-literal={admin}=KEY     # without this one /admin is off
#     kubectl apply -f {name}.yaml
#
"""
_LWS = "# LeaderWorkerSet must be installed in the cluster: https://lws.sigs.k8s.io\n"


class _PlainDumper(yaml.SafeDumper):
    """Repeats equal values instead of pointing to the first with an anchor."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def kubernetes_files(deployment: Deployment, kind: KubernetesKind) -> Mapping[str, str]:
    """Returns {file name: text}."""
    header = _HEADER.format(
        name=deployment.name,
        num_nodes=deployment.num_nodes,
        secret=SECRET_KEY,
        keys=API_KEYS_KEY,
        admin=ADMIN_KEYS_KEY,
    )
    if kind == "leader-worker-set":
        header += _LWS
        manifests = [_leader_worker_set(deployment), _http_service(deployment, kind)]
    else:
        manifests = [
            _headless_service(deployment),
            _stateful_set(deployment),
            _http_service(deployment, kind),
        ]
    text = yaml.dump_all(manifests, Dumper=_PlainDumper, sort_keys=False, width=100)
    return {f"{deployment.name}.yaml": header + text}


def _leader_worker_set(deployment: Deployment) -> Manifest:
    """Builds a set that restarts a pod that ends alone; node 0 admits it again."""
    arguments = deployment.command.arguments()
    labels = _labels(deployment)
    leader = {"metadata": {"labels": {**labels, _NODE_0: "true"}}}
    leader["spec"] = _pod(deployment, arguments, is_node_0=True)
    worker = {"metadata": {"labels": labels}, "spec": _pod(deployment, arguments, is_node_0=False)}
    return {
        "apiVersion": "leaderworkerset.x-k8s.io/v1",
        "kind": "LeaderWorkerSet",
        "metadata": {"name": deployment.name, "labels": labels},
        "spec": {
            "replicas": 1,
            "startupPolicy": "LeaderCreated",
            "leaderWorkerTemplate": {
                "size": deployment.num_nodes,
                "restartPolicy": "None",
                "leaderTemplate": leader,
                "workerTemplate": worker,
            },
        },
    }


def _stateful_set(deployment: Deployment) -> Manifest:
    """Builds a set that numbers pods by their names. All pods start at once, because node 0 waits
    for the others.
    """
    name = deployment.name
    nodes = f"{name}-nodes"
    arguments = deployment.command.arguments(
        num_nodes=deployment.num_nodes,
        coordinator=HostPort(f"{name}-0.{nodes}", deployment.control_port),
    )
    labels = _labels(deployment)
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "serviceName": nodes,
            "replicas": deployment.num_nodes,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": _pod(deployment, arguments, is_node_0=None),
            },
        },
    }


def _pod(deployment: Deployment, arguments: tuple[str, ...], *, is_node_0: bool | None) -> Manifest:
    """Returns a pod. `is_node_0` is None if one template makes all pods, which then have no
    probes.

    All pods wait equally long before SIGTERM: an agent leaves when the drain time is over. Without
    `enableServiceLinks: false` Kubernetes would set variables such as MOE_SERVE_SERVICE_HOST for a
    Service named moe-serve, which look like settings and are unknown.
    """
    ports = [{"name": "control", "containerPort": deployment.control_port}]
    container: Manifest = {
        "name": "moe-serve",
        "image": deployment.container_image,
        "command": ["moe-serve", *map(_verbatim, arguments)],
        "env": _environment(deployment),
        "ports": ports,
        "resources": _resources(deployment),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(_PRE_STOP_S)]}}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "cache", "mountPath": "/var/cache/moe-serve"},
            {"name": "temporary", "mountPath": "/tmp"},
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
    }
    volumes: list[Manifest] = [
        {"name": "cache", "emptyDir": {}},
        {"name": "temporary", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    if is_node_0 is not False:
        ports.append({"name": "http", "containerPort": deployment.http_port})
    if is_node_0 and deployment.probe_scheme is not None:
        container |= _probes(deployment.probe_scheme)
    if deployment.model_claim is not None:
        is_fetched = hub_name_of(deployment.command.model) is not None
        folder = str(PurePosixPath(deployment.command.model or "/models/model").parent)
        path, is_fixed = (_HUB_HOME, False) if is_fetched else (folder, True)
        container["volumeMounts"].append({"name": "model", "mountPath": path, "readOnly": is_fixed})
        claim = {"claimName": deployment.model_claim, "readOnly": is_fixed}
        volumes.append({"name": "model", "persistentVolumeClaim": claim})
    return {
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": _PRE_STOP_S + deployment.stop_timeout_s,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }


def _probes(scheme: str) -> Manifest:
    """Makes a pod live as soon as its port is open, even while it waits for the nodes and loads.
    `cluster.start_timeout_s` limits that time.
    """
    live = {"path": "/health/live", "port": "http", "scheme": scheme}
    ready = {**live, "path": "/health/ready"}
    return {
        "startupProbe": {"httpGet": live, "periodSeconds": 5, "failureThreshold": 60},
        "livenessProbe": {
            "httpGet": live,
            "periodSeconds": 20,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "readinessProbe": {"httpGet": ready, "periodSeconds": 5, "timeoutSeconds": 3},
    }


def _environment(deployment: Deployment) -> list[Manifest]:
    plain = [
        {"name": name, "value": _verbatim(value)} for name, value in deployment.variables.items()
    ]
    secrets: dict[str, Manifest] = {
        "MOE_SERVE_CLUSTER_SECRET": {"key": SECRET_KEY},
        "MOE_SERVE_SERVER_API_KEYS": {"key": API_KEYS_KEY},
        "MOE_SERVE_SERVER_ADMIN_KEYS": {"key": ADMIN_KEYS_KEY, "optional": True},
    }
    return plain + [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": deployment.name, **key}}}
        for name, key in secrets.items()
    ]


def _verbatim(word: str) -> str:
    """Escapes $, as Kubernetes replaces $(NAME) in commands and values; $$ is a dollar."""
    return word.replace("$", "$$")


def _resources(deployment: Deployment) -> Manifest:
    if not deployment.num_devices:
        return {}
    return {"limits": {"nvidia.com/gpu": deployment.num_devices}}


def _headless_service(deployment: Deployment) -> Manifest:
    """Gives the pods names before they are ready, because they only become ready together."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{deployment.name}-nodes", "labels": _labels(deployment)},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": _labels(deployment),
            "ports": [{"name": "control", "port": deployment.control_port}],
        },
    }


def _http_service(deployment: Deployment, kind: KubernetesKind) -> Manifest:
    if kind == "leader-worker-set":
        selector = {**_labels(deployment), _NODE_0: "true"}
    else:
        selector = {"statefulset.kubernetes.io/pod-name": f"{deployment.name}-0"}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{deployment.name}-http", "labels": _labels(deployment)},
        "spec": {
            "selector": selector,
            "ports": [{"name": "http", "port": deployment.http_port, "targetPort": "http"}],
        },
    }


def _labels(deployment: Deployment) -> dict[str, str]:
    return {"app.kubernetes.io/name": "moe-serve", "app.kubernetes.io/instance": deployment.name}
