"""`slipstream up --on kubernetes` against a stand-in of the API server. No cluster ran."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.stage import until
from tests.deploy.typed import Typed
from tests.kit.kubernetes import StandInCluster

pytest.importorskip("kubernetes")

JOB_SET = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets/small"
VOLUME = "/api/v1/namespaces/default/persistentvolumeclaims/small-runs"
DONE = {"conditions": [{"type": "Completed", "status": "True"}]}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCluster]:
    found = StandInCluster()
    monkeypatch.setenv("KUBECONFIG", str(found.write_config(tmp_path)))
    monkeypatch.setenv("SLIPSTREAM_TOKEN", "0123456789abcdef0123456789abcdef")
    yield found
    found.close()


def up(run_file: Path, *settings: str) -> Typed:
    return Typed("up", str(run_file), "--on", "kubernetes", "--cluster.image", "registry.local/rl:1", *settings)


def ended(process: Typed) -> tuple[int, str]:
    said, _ = process.communicate(timeout=100)
    return process.wait(), said


def test_a_run_is_applied_followed_and_deleted_but_for_its_volume(cluster: StandInCluster, run_file: Path) -> None:
    cluster.add_pod("small-learner-0", "learner")
    cluster.add_pod("small-servers-a", "server", "Pending")
    cluster.logs["small-learner-0"] = ["2026-01-01T00:00:00.1Z step 1/2", "2026-01-01T00:00:00.2Z step 2/2"]
    process = up(run_file)
    until(lambda: JOB_SET in cluster.objects)
    cluster.logs["small-learner-0"].append("2026-01-01T00:00:00.3Z done")
    lines: list[str] = []
    # `communicate` loses what `readline` has read ahead.
    while not {"done\n", "small: 1 learner running, 1 server pending\n"} <= {*lines}:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    assert {each["kind"] for each in cluster.objects.values()} >= {"Secret", "Deployment", "NetworkPolicy", "Service"}
    cluster.status = DONE
    code, said = ended(process)
    said = "".join(lines) + said
    assert code == 0, said
    assert [line for line in said.splitlines() if line.startswith(("step", "done"))] == ["step 1/2", "step 2/2", "done"]
    assert [*cluster.objects] == [VOLUME]
    assert cluster.tokens == {"Bearer a-token"}


def test_ctrl_c_deletes_what_has_pods_first_and_shows_the_last_words(cluster: StandInCluster, run_file: Path) -> None:
    cluster.add_pod("small-learner-0", "learner")
    process = up(run_file)
    until(lambda: JOB_SET in cluster.objects)
    process.send_signal(signal.SIGINT)
    code, said = ended(process)
    assert code == 130, said
    assert [*cluster.objects] == [VOLUME]
    kinds = [path.split("/")[-2] for path in cluster.deleted]
    assert kinds.index("secrets") > max(kinds.index("jobsets"), kinds.index("deployments"))


def test_a_learner_that_fails_has_its_code_and_all_is_deleted(cluster: StandInCluster, run_file: Path) -> None:
    cluster.add_pod("small-learner-0", "learner", "Failed", code=3)
    cluster.status = {"conditions": [{"type": "Failed", "status": "True", "message": "jobset failed: max restarts"}]}
    code, said = ended(up(run_file))
    assert code == 3
    assert "JobSet small failed: jobset failed: max restarts; the learner's code is 3" in said
    assert [*cluster.objects] == [VOLUME]


@pytest.mark.parametrize(
    ("kind", "status", "text", "told"),
    [
        (
            *("JobSet", 404, "the server could not find the requested resource"),
            "the cluster refuses JobSet small: the server could not find the requested resource; install the JobSet "
            "operator (https://jobset.sigs.k8s.io)",
        ),
        (
            *("Secret", 403, "secrets is forbidden"),
            "the cluster refuses Secret small-tokens: secrets is forbidden",
        ),
    ],
)
def test_what_the_cluster_refuses_is_one_line_and_nothing_is_placed(
    cluster: StandInCluster, run_file: Path, kind: str, status: int, text: str, told: str
) -> None:
    cluster.refusals[kind] = (status, text)
    assert ended(up(run_file)) == (2, f"slipstream: --on kubernetes: {told}\n")
    assert cluster.objects == {}


def test_a_run_of_that_name_is_left_alone(cluster: StandInCluster, run_file: Path) -> None:
    cluster.objects[JOB_SET] = {"kind": "JobSet"}
    code, said = ended(up(run_file))
    assert code == 2
    assert said.startswith("slipstream: run.name: a JobSet small is in namespace default already; choose another name")
    assert [*cluster.objects] == [JOB_SET]


def test_no_cluster_is_one_line(cluster: StandInCluster, run_file: Path, tmp_path: Path) -> None:
    cluster.close()
    code, said = ended(up(run_file))
    assert code == 2
    assert said.splitlines()[-1].startswith("slipstream: --on kubernetes: the cluster does not answer: ")
    os.environ["KUBECONFIG"] = str(tmp_path / "nothing")
    code, said = ended(up(run_file))
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith("slipstream: --on kubernetes: no cluster is configured")


def test_of_two_commands_at_once_one_is_refused_and_leaves_the_other_alone(
    cluster: StandInCluster, run_file: Path
) -> None:
    cluster.add_pod("small-learner-0", "learner")
    both = [up(run_file), up(run_file)]
    until(lambda: [each for each in both if each.poll() is not None])
    (faster,) = [each for each in both if each.poll() is None]
    (slower,) = [each for each in both if each is not faster]
    code, said = ended(slower)
    assert code == 2
    assert said.startswith("slipstream: run.name: a JobSet small is in namespace default already")
    assert cluster.deleted == []
    until(lambda: any("workers" in path for path in cluster.objects))
    cluster.status = DONE
    assert ended(faster)[0] == 0
    assert [*cluster.objects] == [VOLUME]


def test_a_cluster_that_does_not_answer_for_a_while_costs_nothing(cluster: StandInCluster, run_file: Path) -> None:
    cluster.add_pod("small-learner-0", "learner")
    cluster.failures["POST"] = 1
    process = up(run_file)
    until(lambda: JOB_SET in cluster.objects)
    cluster.failures["PATCH"] = 1
    until(lambda: any("/deployments/small-workers" in path for path in cluster.objects))
    cluster.failures["GET"] = 2
    until(lambda: cluster.failures["GET"] == 0)
    cluster.failures["DELETE"] = 2
    cluster.status = DONE
    code, said = ended(process)
    assert code == 0, said
    assert said.count("the cluster does not answer, asking again: the server is currently unable to handle") == 1
    assert "small: the cluster answers again" in said
    assert [*cluster.objects] == [VOLUME]
