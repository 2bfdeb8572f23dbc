"""rsl_rl's runner for an algorithm that learns from a replay buffer."""

from __future__ import annotations

from typing import Any

from rsl_rl.runners import OnPolicyRunner

#: The keys of a configuration: those of rsl_rl, and what mjlab and Isaac Lab keep beside them.
KNOWN = frozenset(
    ("class_name", "num_steps_per_env", "save_interval", "obs_groups", "actor", "critic", "algorithm", "logger")
).union(
    (
        "check_for_nan",
        "multi_gpu",
        "torch_compile_mode",
        "run_name",
        "device",
        "seed",
        "max_iterations",
        "upload_model",
    ),
    ("experiment_name", "clip_actions", "resume", "load_run", "load_checkpoint", "wandb_project", "wandb_tags"),
    ("neptune_project",),
)


class OffPolicyRunner(OnPolicyRunner):
    """rsl_rl's ``OnPolicyRunner`` with an off-policy algorithm, and a configuration whose keys are checked.

    Loop, log, checkpoints and export are rsl_rl's: ``learn``, ``save``, ``load``, ``get_inference_policy``,
    ``export_policy_to_jit``, ``export_policy_to_onnx``, ``add_git_repo_to_log``.

    Args:
        env: rsl_rl's ``VecEnv``.
        train_cfg: the configuration. It is changed, as by rsl_rl.
        log_dir: where log and checkpoints go; None: neither.
        device: of networks and ring.

    Raises:
        ValueError: a key is unknown, or a value is not possible.
    """

    def __init__(self, env: Any, train_cfg: dict[str, Any], log_dir: str | None = None, device: str = "cpu") -> None:
        if unknown := sorted(set(train_cfg) - KNOWN):
            raise ValueError(f"unknown keys {unknown} of the configuration: there are {sorted(KNOWN)}")
        super().__init__(env, train_cfg, log_dir, device)
