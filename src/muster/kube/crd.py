"""What does the Kubernetes API know about a training? The definition of `trainings.muster.dev`.

Its schema follows from the records in `types.training`, so that both sides take the same fields within the same limits.
What only several fields together can get wrong (`min ≤ target ≤ max`, names in `env`) is left to the controller:
servers before 1.25 have no rules for that. The words of `kubectl explain` are in `ABOUT`, one sentence per field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.types.codec import schema_of, to_wire
from muster.types.training import API_VERSION, KIND, Metadata, Spec, Status

GROUP, VERSION = API_VERSION.split("/")
PLURAL, SINGULAR = "trainings", "training"
NAME = f"{PLURAL}.{GROUP}"
BACKEND = "kube"

_PROGRAMS = ("command", "script", "module")

# Where the same record is shown twice, the words are those of the first place.
_SAME = {"status.outcome.firstFailure": "status.rankExits"}

ABOUT: dict[str, str] = {
    "": "One training: its workers form a world that heals after losses and can be resized while it runs.",
    "spec": "What is asked for. Exactly one of command, script and module is needed.",
    "spec.command": "A program and its arguments; no shell reads it. Cannot change later.",
    "spec.script": "A Python script in the image; a relative path counts from workingDir. Cannot change later.",
    "spec.module": "A Python module, as with python -m. Cannot change later.",
    "spec.args": "Arguments behind the program. Cannot change later.",
    "spec.interpreter": "Has no effect here: the image's Python is used. Cannot change later.",
    "spec.workingDir": "Where ranks run; without it the image's own. Cannot change later.",
    "spec.env": "Variables for the ranks; names that begin with MUSTER_ are taken. Cannot change later.",
    "spec.worldSize": "How many workers train together: 1 ≤ min ≤ target ≤ max.",
    "spec.worldSize.min": "Fewer workers than that do not train.",
    "spec.worldSize.target": "How many workers are wanted; kubectl scale changes it.",
    "spec.worldSize.max": "The most workers that a scale may ask for.",
    "spec.spares": "More workers that wait, warm, to take the place of one that is lost.",
    "spec.procsPerWorker": "Ranks per worker. Cannot change later.",
    "spec.resources": "What each worker needs. Cannot change later.",
    "spec.resources.cpu": "CPUs per worker, as a number: 0.5, not 500m.",
    "spec.resources.memory": "Memory per worker, like 512Mi or 4Gi.",
    "spec.resources.gpus": "GPUs per worker, given whole.",
    "spec.maxRestarts": "Failures of ranks that the training survives; lost workers and resizes do not count.",
    "spec.leaseSeconds": "A worker that is silent for that long is lost, and ends its ranks. Cannot change later.",
    "spec.hangTimeoutSeconds": "Restart the round when no rank advances for that long; off when absent.",
    "spec.noProgressRounds": "Fail after so many rounds in a row without a new highest step; off when absent.",
    "spec.activeDeadlineSeconds": "Fail when it has run, or waited to begin, for that long; off when absent.",
    "spec.belowMinimumTimeoutSeconds": "Fail when fewer than min workers could be had for that long.",
    "spec.stopGraceSeconds": "From SIGTERM to SIGKILL when ranks are stopped for good, resized or drained.",
    "spec.ttlSecondsAfterFinished": "Delete the training that long after its end; never when absent.",
    "spec.logBytes": "The newest bytes of each rank's output, and of its errors, that are kept; 0 for all.",
    "spec.warm": "Whether ranks are forked from a process that has imported what they need: auto, always (torch, too, "
    "where no import of it is found), never (each rank is a fresh interpreter). Cannot change later.",
    "spec.preload": "Modules to import ahead beside those that the program imports; only the word none: nothing. "
    "Cannot change later.",
    "spec.secretEnv": "Names of env that no read through muster shows, and that reach Pods by a Secret. "
    "Whoever may read the Training with kubectl sees their values. Cannot change later.",
    "spec.cancel": "The order to end the training. Once stored it stands.",
    "spec.cancel.requestedAt": "When the order was given.",
    "spec.cancel.graceSeconds": "From SIGTERM to SIGKILL, in place of stopGraceSeconds.",
    "spec.priority": "Higher goes first when GPUs are short, then older.",
    "spec.backend": "Who runs the workers; in a cluster that is kube. Cannot change later.",
    "spec.image": "Container image of the workers, with Python 3.11 or newer in it; by default the one that muster was "
    "installed with. Cannot change later.",
    "spec.package": "The hash of the code that was sent with it, which workers fetch, unpack and run in. "
    "Cannot change later.",
    "spec.requirements": "Lines of a requirements file: an environment with them is made on each worker. "
    "Cannot change later.",
    "spec.mesh": "Whether ranks wait until all workers reach each other. Cannot change later.",
    "spec.mesh.required": "Hold ranks until all workers reach each other.",
    "spec.mesh.timeoutSeconds": "Hold them at most that long; then they run, and the condition DegradedMesh tells.",
    "spec.mesh.probeAddress": "The address or network that workers probe each other over.",
    "spec.segment": "Only whole groups of so many workers from one domain train; min and target are multiples of it. "
    "Cannot change later.",
    "spec.topologyKey": "The node label whose value is a worker's domain: a rack, a switch. Without it every node is a "
    "domain of its own. Cannot change later.",
    "spec.template": "A partial Pod (metadata.labels, metadata.annotations, spec), merged onto that of each worker as "
    "kubectl patch would. What muster needs cannot be overwritten: the condition Valid names the field. Cannot change "
    "later.",
    "spec.storage": "Volumes that outlive workers, for checkpoints. Cannot change later.",
    "spec.storage.name": "Its name; ranks find its path in the variable MUSTER_STORAGE_NAME.",
    "spec.storage.mount": "Where workers find it.",
    "spec.storage.claim": "A PersistentVolumeClaim that is there already.",
    "spec.storage.size": "Make a claim of that size, called like the training and this, or use the one of a training "
    "of the same name.",
    "spec.storage.class": "The StorageClass of the claim that is made; by default the cluster's own.",
    "spec.storage.access": "The access mode of the claim that is made.",
    "spec.storage.keep": "Whether the claim that is made stays when the training is deleted.",
    "spec.elasticity": "fixed: it keeps what it was admitted with. lend: workers above min may be taken for somebody "
    "with a better claim, and come back. fill: as lend, and it grows to max while GPUs would idle. In a cluster it has "
    "no effect in this version.",
    "spec.bench": "Measure all-reduce between the workers before the program of the first round begins, for at most "
    "60 s. What was found is status.bench.",
    "spec.suspend": "No worker runs while this is true; those that do are told to save, and leave. Kueue and others "
    "that admit trainings turn it.",
    "status": "What is; written by the control plane alone, in one step per change.",
    "status.observedGeneration": "The generation that the rest of the status is about.",
    "status.phase": "pending, ready once min workers have run ranks, then succeeded, failed or cancelled, which stays.",
    "status.conditions": "Admitted, TargetReached, BelowMinimum, Resizing, Stalled, MeshReady, DegradedMesh; "
    "Valid is False while the spec makes no sense.",
    "status.conditions.type": "Which condition.",
    "status.conditions.status": "Whether it holds: True, False or Unknown.",
    "status.conditions.reason": "Why, in one word.",
    "status.conditions.message": "Why, in a sentence.",
    "status.conditions.lastTransitionTime": "When its status last changed.",
    "status.conditions.observedGeneration": "The generation that it is about.",
    "status.worldSize": "How many workers there are, beside how many there should be.",
    "status.worldSize.ready": "Workers all of whose ranks of the current round have started; 0 while a round forms.",
    "status.worldSize.target": "The target that is acted on.",
    "status.worldSize.min": "The min that is acted on.",
    "status.worldSize.max": "The max that is acted on.",
    "status.worldSize.belowMinimum": "Whether fewer than min workers are there.",
    "status.spares": "Workers that wait for a rank.",
    "status.spares.ready": "Those that are connected and healthy without a rank.",
    "status.spares.target": "How many there should be.",
    "status.round": "Number of the current or last round, from 0; absent before the first.",
    "status.roundTimes": "How long the round took from the loss or the request that it follows: until all its ranks "
    "ran, and until the first step of any rank; absent for the first round.",
    "status.roundTimes.round": "Which round.",
    "status.roundTimes.ranksRunSeconds": "Until all its ranks ran.",
    "status.roundTimes.nextStepSeconds": "Until the first step of any rank; absent while no rank has told a step.",
    "status.rendezvousEndpoint": "HOST:PORT of the store at which the ranks of the round that is out meet; absent "
    "while none is.",
    "status.restarts": "How many of maxRestarts are used.",
    "status.ranks": "The ranks of the current round.",
    "status.ranks.rank": "Its number, from 0.",
    "status.ranks.worker": "The worker, and Pod, that runs it.",
    "status.ranks.node": "The node that the worker is on.",
    "status.ranks.phase": "starting, running, stopping, succeeded, failed or lost.",
    "status.ranks.round": "The round that it was started for.",
    "status.ranks.restarts": "How often this rank was started again.",
    "status.ranks.startedAt": "When it was started.",
    "status.ranks.step": "The last step that it reported.",
    "status.workers": "The workers that are there, at most 256 of them: those with ranks first, then spares.",
    "status.workers.name": "Its name, and that of its Pod.",
    "status.workers.role": "active, spare, lent, parked (it gets no rank), starting, leaving or dead.",
    "status.workers.node": "The node that it is on.",
    "status.workers.ranks": "The ranks that it has in the current round, like 3 or 8-15.",
    "status.workers.since": "Since when it has that role.",
    "status.workers.note": "What it waits for, or why it gets no rank.",
    "status.rankExits": "How each rank of the last round ended; absent while it runs, [] if none ever started.",
    "status.rankExits.rank": "Its number, from 0.",
    "status.rankExits.exitCode": "128+n for signal n; absent if nobody saw it.",
    "status.rankExits.terminationReason": "The most telling reason that is known, like Completed, OOMKilled or Exit 3.",
    "status.rankExits.signal": "The signal that ended it, like SIGKILL.",
    "status.rankExits.worker": "The worker, and Pod, that ran it.",
    "status.rankExits.node": "The node that the worker was on.",
    "status.rankExits.round": "The round that it ran in.",
    "status.rankExits.restartCount": "How often this rank had been started again.",
    "status.rankExits.finishedAt": "When it ended.",
    "status.rankExits.stderrTail": "The last lines that it wrote to stderr.",
    "status.rankExits.exception": "The line that ended its last traceback; empty if it printed none.",
    "status.rankExits.place": "File and line of that traceback's last frame in the user's own code, like train.py:71.",
    "status.outcome": "How the training ended; stored before the ranks are stopped, so it comes before the last phase.",
    "status.outcome.state": "succeeded, failed or cancelled.",
    "status.outcome.reason": "Why, in one word.",
    "status.outcome.message": "Why, in a sentence.",
    "status.outcome.firstFailure": "The rank's exit that was the first to fail.",
    "status.outcome.finishedAt": "When it was decided.",
    "status.lastResize": "The last change of the target.",
    "status.lastResize.fromTarget": "The target before.",
    "status.lastResize.toTarget": "The target after.",
    "status.lastResize.reason": "Who or what asked for it.",
    "status.lastResize.at": "When.",
    "status.keptState": "What muster.State keeps of the training; absent while its program keeps nothing with it.",
    "status.keptState.step": "The newest step that is whole in memory after the loss of any one worker; if there is "
    "none, the newest that is whole in memory. Written with the steps of ranks, at most once a second.",
    "status.keptState.round": "The round in which that step was committed.",
    "status.keptState.survives": "What that step survives: nothing (there is none), ranks that fail, the loss of any "
    "one worker, or of any one failure domain.",
    "status.keptState.safeAt": "Since when it does.",
    "status.keptState.newestStep": "The newest step that is whole in memory, wherever that is.",
    "status.keptState.durableStep": "The newest step that is on disk.",
    "status.keptState.where": "Who has it in memory.",
    "status.keptState.copies": "How many workers have it, of the rank that fewest have.",
    "status.keptState.bytes": "Its size, each rank once.",
    "status.keptState.memoryBytes": "Memory that state takes on all workers.",
    "status.keptState.workerMemoryBytes": "Memory that it takes on the worker where it takes most.",
    "status.keptState.every": "A copy is taken at each step that is a multiple of this.",
    "status.keptState.commitSeconds": "What a copy takes from the training, on the slowest rank.",
    "status.keptState.stepSeconds": "What a step takes there.",
    "status.keptState.overhead": "What copies take, as a share of the time of steps.",
    "status.keptState.loss": "What the loss of a worker would cost now, of the one whose loss would cost most.",
    "status.keptState.lossSteps": "How many steps that is.",
    "status.keptState.lossSeconds": "And how many seconds of training.",
    "status.keptState.resumed": "Where the ranks of this round went on, and why there.",
    "status.keptState.reached": "How many steps the ranks of this round have finished at most.",
    "status.keptState.lost": "Which finished steps this round began without, because no copy of them survived.",
    "status.keptState.lostSteps": "How many steps that is.",
    "status.keptState.refused": "Workers that cannot keep state, and why.",
    "status.bench": "How fast all-reduce was between its workers before its program began; only with spec.bench.",
    "status.bench.round": "The round that measured it.",
    "status.bench.measuredAt": "When that was known.",
    "status.bench.via": "What carried it: gloo or nccl.",
    "status.bench.workers": "Between so many workers.",
    "status.bench.ranks": "With so many ranks on them.",
    "status.bench.latencySeconds": "What the smallest size takes, half of the time.",
    "status.bench.bytesPerSecond": "What each link of a ring carries with the largest size, half of the time.",
    "status.bench.sizes": "What was measured, size by size.",
    "status.bench.sizes.bytes": "So much was added up at a time.",
    "status.bench.sizes.count": "So often.",
    "status.bench.sizes.fastSeconds": "A tenth of the times took no longer.",
    "status.bench.sizes.medianSeconds": "Half of the times took no longer.",
    "status.bench.sizes.slowSeconds": "Nine tenths of the times took no longer.",
    "status.bench.error": "Why nothing was measured; the training goes on all the same.",
    "status.startedAt": "When ranks first ran.",
    "status.steady": "Where the time of day was set: the same moments on the clock that durations are measured with.",
    "status.steady.decidedAt": "When it came to its outcome.",
    "status.steady.finishedAt": "When it ended.",
    "status.steady.startedAt": "When ranks first ran.",
    "status.steady.waitsSince": "Since when one with a deadline may begin: first looked at, or resumed.",
    "status.finishedAt": "When the last phase was written.",
}

_JOURNAL = "For the control plane: what the journal says of the last change, should it not have been written."

# Title, where it is, type, and whether only `-o wide` shows it.
_COLUMNS = (
    ("Phase", ".status.phase", "string", False),
    ("Ready", ".status.worldSize.ready", "integer", False),
    ("Target", ".spec.worldSize.target", "integer", False),
    ("Round", ".status.round", "integer", False),
    ("Age", ".metadata.creationTimestamp", "date", False),
    ("Restarts", ".status.restarts", "integer", True),
    ("Reason", ".status.outcome.reason", "string", True),
)


def custom_resource_definition() -> dict[str, Any]:
    """The CRD, as `apiextensions.k8s.io/v1` of 1.20 and later takes it."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": NAME},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": ["mt"],
            },
            "versions": [_version()],
        },
    }


def schema() -> dict[str, Any]:
    """The structural schema of a whole object."""
    spec = _described(schema_of(Spec), "spec", to_wire(Spec(backend=BACKEND)))
    spec["oneOf"] = [{"required": [name]} for name in _PROGRAMS]
    spec["properties"]["command"]["minItems"] = 1
    spec["properties"]["script"]["minLength"] = 1
    spec["properties"]["leaseSeconds"]["not"] = {"maximum": 0}  # 1.20 compares 0 with the whole part of its least, too
    status = _described(schema_of(Status), "status", {})
    status["properties"]["conditions"] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    status["properties"]["journal"] = {"type": "string", "description": _JOURNAL}
    name = schema_of(Metadata)["properties"]["name"]
    del name["description"]  # kubectl has words of its own for names
    return {
        "type": "object",
        "description": ABOUT[""],
        "required": ["spec"],
        "properties": {
            "metadata": {"type": "object", "properties": {"name": name}},
            "spec": spec,
            "status": status,
        },
    }


def _version() -> dict[str, Any]:
    columns = [
        {"name": title, "type": kind, "jsonPath": path, **({"priority": 1} if wide else {})}
        for title, path, kind, wide in _COLUMNS
    ]
    scale = {"specReplicasPath": ".spec.worldSize.target", "statusReplicasPath": ".status.worldSize.ready"}
    return {
        "name": VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema()},
        "subresources": {"status": {}, "scale": scale},
        "additionalPrinterColumns": columns,
    }


def _described(schema: Mapping[str, Any], path: str, default: Any) -> dict[str, Any]:
    """A schema with its words, and with the defaults that a reader of the object should see."""
    shown = {key: value for key, value in schema.items() if key != "nullable"} | {"description": _words(path)}
    if "properties" in schema:
        inner = default if isinstance(default, Mapping) else {}
        needed = schema.get("required", ())
        shown["properties"] = {}
        for name, part in schema["properties"].items():
            field = _described(part, f"{path}.{name}", inner.get(name))
            shown["properties"][name] = field if part.get("nullable") or name in needed else _or_empty(field)
        return shown | ({"default": {}} if inner and "." in path else {})
    for many in schema.keys() & {"items", "additionalProperties"}:
        shown[many] = _within(schema[many], path)
    if shown["type"] == "object" and "additionalProperties" not in schema:
        shown["x-kubernetes-preserve-unknown-fields"] = True  # what is in it is looked at by the controller
    if default is not None and not isinstance(default, Mapping | list):
        shown["default"] = int(default) if isinstance(default, float) and default.is_integer() else default
    return shown


def _within(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    """What a list or a map holds; the words are those of the whole."""
    if "properties" not in item:
        return _or_empty(dict(item))
    record = _described(item, path, None)
    del record["description"]
    return record


def _or_empty(field: dict[str, Any]) -> dict[str, Any]:
    """A text that may be "" is nullable: a 1.20 built with a Go that is newer than itself takes that for null.

    Nothing else is: the server drops a null, and `kubectl explain` could not tell the type.
    """
    plain = field["type"] == "string" and not field.keys() & {"enum", "format", "pattern"}
    return field | {"nullable": True} if plain else field


def _words(path: str) -> str:
    for place, first in _SAME.items():
        if path.startswith(f"{place}."):
            return ABOUT[first + path.removeprefix(place)]
    return ABOUT[path]
