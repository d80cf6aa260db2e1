"""What a script asks of its trainer before and after the training, under the names of transformers' `Trainer`: its
state, its model, its logs, and where the model goes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slipstream.protocol import checkpoints
from slipstream.protocol.config import ConfigError
from slipstream.rollout_worker.task.task import Task
from slipstream.script import loading_a_task, without_frames
from slipstream.trl.configs import _Config
from slipstream.trl.models import check_object, load_policy, load_processing_class, save_as_it_is
from slipstream.trl.state import TrainerState, read_state
from slipstream.trl.translate import Translation

CARD = "README.md"

# Folder of the whole model, in that of an adapter.
MERGED = "merged"


class Face:
    """The part of a trainer that reads the run directory.

    Attributes:
        args: The script's config.
        task: What the workers play.
    """

    args: _Config
    task: Task
    # Folder or name of the model, and the object that the script gave instead.
    _base: str
    _object: Any
    # The checkpoint whose model was loaded last, and that model.
    _loaded: tuple[Path | None, Any] | None
    # What the script has logged.
    _logged: list[dict[str, Any]]
    # Whether this trainer has trained: what stands in its run directory before that is another's.
    _trained: bool
    # Rows of the data set; None where it is read as it comes.
    _rows: int | None
    _processing_class: Any
    _tokenizer: str | None
    _peft_config: Any

    def translated(self, context: int | None) -> Translation:
        """Return the run's settings. `context` is the model's length in tokens; None if it is not known."""
        raise NotImplementedError

    @property
    def state(self) -> TrainerState:
        """What the run has done so far, as transformers' `TrainerState`."""
        if self._trained:
            state = read_state(self.run_dir, self._logged, self._steps_per_epoch())
        else:
            state = TrainerState(log_history=[*self._logged])
        state.max_steps = max(int(self.args.field("max_steps") or 0), state.global_step)
        return state

    def _steps_per_epoch(self) -> float | None:
        """Return the steps in which each row of the data set is drawn once; None where its rows are not counted."""
        groups = self.translated(None).sections["learner"]["groups_per_step"]
        return self._rows / groups if self._rows else None

    @property
    def model(self) -> Any:
        """The policy as a transformers model: as the script gave it, and after `train` the newest checkpoint's.

        It is a copy: what is done to it does not reach the run. It is loaded when it is asked for.
        """
        checkpoint = self._checkpoint() if self._trained else None
        if checkpoint is None and self._object is not None:
            if self._peft_config is None or hasattr(self._object, "peft_config"):
                return self._object
            self._save_object()  # peft would change the script's own
        if self._loaded is None or self._loaded[0] != checkpoint:
            settings = self.translated(None).sections["model"]
            self._loaded = checkpoint, load_policy(self._base, checkpoint, settings, self._peft_config)
        return self._loaded[1]

    @model.setter
    def model(self, value: str | Path) -> None:
        check_object(value, type(self).__name__)
        self._object, self._base, self._loaded = None, text_of(value), None

    @property
    def processing_class(self) -> Any:
        """The tokenizer, or the processor of a model that sees."""
        if self._processing_class is None or isinstance(self._processing_class, str):
            path = self._processing_class or self._tokenizer or self._base
            self._processing_class = load_processing_class(path, bool(self.args.field("trust_remote_code")))
        return self._processing_class

    @property
    def accelerator(self) -> Any:
        """What scripts ask of accelerate: the script is one process, and the main one."""
        return SimpleNamespace(
            is_main_process=True,
            is_local_main_process=True,
            num_processes=1,
            process_index=0,
            print=print,
            wait_for_everyone=lambda: None,
        )

    @property
    def reward_funcs(self) -> list[Any]:
        """The rewards, with a function in the place of each model."""
        return list(self.task.rewards)

    @property
    def reward_processing_classes(self) -> list[Any]:
        """The tokenizer of each reward, as the script gave it; None of a function."""
        return [getattr(reward, "processing_class", None) for reward in self.task.rewards]

    @property
    def aux_loss_enabled(self) -> bool:
        """Whether the loss has the auxiliary one of a mixture of experts."""
        return bool(self.args.field("router_aux_loss_coef"))

    def is_world_process_zero(self) -> bool:
        """Return True: the script is one process."""
        return True

    is_local_process_zero = is_world_process_zero

    def __getattr__(self, name: str) -> Any:
        args = vars(self).get("args")
        if args is not None and name in type(args).names():
            return args.field(name)
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}: learner, workers and servers are their own processes"
        )

    def log(self, logs: dict[str, float], *_: Any) -> None:
        """Add metrics of the script's own to `state.log_history`. Trackers get those of the run alone."""
        state = self.state
        self._logged.append({**logs, "epoch": state.epoch, "step": state.global_step})

    def log_metrics(self, split: str, metrics: dict[str, float], *_: Any) -> None:
        """Log metrics under names that begin with the split's."""
        self.log({name if name.startswith(f"{split}_") else f"{split}_{name}": metrics[name] for name in metrics})

    save_metrics = log_metrics

    def save_state(self) -> None:
        """Write `state` to trainer_state.json in the run directory."""
        if loading_a_task() is None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self.state.save_to_json(self.run_dir / "trainer_state.json")

    @property
    def run_dir(self) -> Path:
        """The run directory, relative to the working directory."""
        run = self.translated(None).sections["run"]
        return Path(run["dir"], run["name"])

    @without_frames
    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Copy the newest checkpoint's model to `output_dir`, by default the run directory.

        With `load_best_model_at_end` it is the best checkpoint's. Of a run with `peft_config` it is the adapter with
        the tokenizer, as TRL saves it and `AutoPeftModelForCausalLM` loads it; `merged/` holds the whole model. Before
        the first checkpoint, `model` and `processing_class` are saved as they are.
        """
        if loading_a_task() is not None:
            return
        found, target = self._checkpoint(), Path(output_dir or self.run_dir)
        if found is None:
            save_as_it_is(self.model, self.processing_class, target)
            return
        adapter = found / checkpoints.ADAPTER
        if not adapter.is_dir():
            shutil.copytree(found / checkpoints.MODEL, target, dirs_exist_ok=True)
            return
        shutil.copytree(found / checkpoints.MODEL, target / MERGED, dirs_exist_ok=True)
        # A config.json in the same folder would make it a whole model to transformers.
        whole = shutil.ignore_patterns("*.safetensors*", "config.json", "generation_config.json")
        shutil.copytree(found / checkpoints.MODEL, target, dirs_exist_ok=True, ignore=whole)
        shutil.copytree(adapter, target, dirs_exist_ok=True)

    @without_frames
    def create_model_card(
        self, model_name: str | None = None, dataset_name: Any = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the newest model's card into the run directory, as README.md.

        Args:
            model_name: Name of the model in the card.
            dataset_name: Name of the data set, or several.
            tags: Tags next to those of the method.
        """
        if loading_a_task() is None:
            self._write_card(self._model("create_model_card"), self.run_dir / CARD, model_name, dataset_name, tags)

    def _write_card(self, model: Path, file: Path, model_name: str | None, dataset_name: Any, tags: Any) -> None:
        from huggingface_hub import ModelCard

        if not (model / CARD).is_file():
            return
        card = ModelCard.load(model / CARD, ignore_metadata_errors=True)
        if model_name is not None:
            card.data.model_name = model_name
        if dataset_name is not None:
            card.data.datasets = dataset_name
        if tags is not None:
            card.data.tags = [*(card.data.tags or ()), *([tags] if isinstance(tags, str) else tags)]
        card.save(file)

    @without_frames
    def push_to_hub(
        self,
        commit_message: str = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        model_name: str | None = None,
        dataset_name: Any = None,
        tags: str | list[str] | None = None,
        **_: Any,
    ) -> Any:
        """Upload the model that `save_model` copies, with its card. Returns the hub's answer about the commit.

        Args:
            commit_message: Message of the commit.
            blocking: Whether to wait for it; otherwise its future is returned.
            token: The hub's token; `hub_token` by default.
            revision: Branch to commit to.
            model_name: Of the card, as `dataset_name` and `tags`; see `create_model_card`.

        Raises:
            ConfigError: The hub cannot be reached, or refuses it. The model is where it was.
        """
        if loading_a_task() is not None:
            return None
        from huggingface_hub import HfApi

        hub = self.translated(None).sections.get("hub", {})
        api = HfApi(token=token or self.args.given.get("hub_token"))
        folder = self._model("push_to_hub")
        if (folder.parent / checkpoints.ADAPTER).is_dir():
            folder = self.run_dir / "adapter"
            self.save_model(folder)
        self._write_card(folder, folder / CARD, model_name, dataset_name, tags)
        name = hub.get("hub_model_id", self.run_dir.name)
        given: dict[str, Any] = {} if revision is None else {"revision": revision}
        if not blocking:
            given["run_as_future"] = True
        try:
            repo = api.create_repo(name, private=hub.get("hub_private_repo"), exist_ok=True).repo_id
            return api.upload_folder(repo_id=repo, folder_path=folder, commit_message=commit_message, **given)
        except Exception as error:  # of the hub's client, its transport and its checks
            raise ConfigError(
                f"push_to_hub(): {name} was not uploaded: {type(error).__name__}: {str(error).strip()}; the model is "
                f"in {folder}: upload it later with: hf upload {name} {folder}"
            ) from error

    def _model(self, method: str) -> Path:
        found = self._checkpoint()
        if found is None:
            raise ConfigError(f"{method}(): {self.run_dir} holds no checkpoint; call it after train()")
        return found / checkpoints.MODEL

    def _checkpoint(self) -> Path | None:
        """Return the folder of the newest checkpoint, or of the best with `load_best_model_at_end`; None without."""
        found = checkpoints.complete(self.run_dir)
        best = checkpoints.best(self.run_dir) if self.args.field("load_best_model_at_end") else None
        return Path(found[best.step if best else max(found)]) if found else None


def text_of(model: Any) -> str:
    """Return a model's folder or name; that of an object is where it was loaded from."""
    return str(model) if isinstance(model, str | Path) else str(getattr(model, "name_or_path", "") or "model")
