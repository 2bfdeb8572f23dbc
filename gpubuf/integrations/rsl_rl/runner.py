"""rsl_rl's runner for an algorithm that learns from a replay buffer."""

from __future__ import annotations

from typing import Any

from rsl_rl.runners import OnPolicyRunner

from gpubuf.integrations.rsl_rl.algorithms import OffPolicy

#: What a configuration has where it says nothing.
DEFAULTS: dict[str, Any] = {
    "num_steps_per_env": 24,
    "save_interval": 50,
    "obs_groups": {},
    "algorithm": {"class_name": "gpubuf.integrations.rsl_rl:FastSAC"},
}

#: The keys of a configuration: those of rsl_rl, and what mjlab and Isaac Lab keep beside them.
KNOWN = frozenset(DEFAULTS).union(
    ("actor", "critic", "class_name", "device", "seed", "max_iterations", "multi_gpu", "torch_compile_mode"),
    ("logger", "run_name", "experiment_name", "check_for_nan", "clip_actions", "upload_model"),
    ("resume", "load_run", "load_checkpoint", "wandb_project", "wandb_tags", "neptune_project"),
)


class OffPolicyRunner(OnPolicyRunner):
    """rsl_rl's ``OnPolicyRunner`` with an off-policy algorithm, and a configuration that is checked.

    Loop, log, checkpoints and export are rsl_rl's: ``learn``, ``save``, ``load``, ``get_inference_policy``,
    ``export_policy_to_jit``, ``export_policy_to_onnx``, ``add_git_repo_to_log``.

    Args:
        env: rsl_rl's ``VecEnv``.
        train_cfg: the configuration. It is changed, as by rsl_rl.
        log_dir: where log and checkpoints go; None: neither.
        device: of networks and ring.

    Raises:
        ValueError: a key is unknown, or the algorithm is none of those that learn from a buffer.
    """

    alg: OffPolicy

    def __init__(self, env: Any, train_cfg: dict[str, Any], log_dir: str | None = None, device: str = "cpu") -> None:
        if unknown := sorted(set(train_cfg) - KNOWN):
            raise ValueError(f"unknown keys {unknown} of the configuration: there are {sorted(KNOWN)}")
        for name, value in DEFAULTS.items():
            train_cfg.setdefault(name, value)
        super().__init__(env, train_cfg, log_dir, device)
        if not isinstance(self.alg, OffPolicy):
            raise ValueError(f"{train_cfg['algorithm']['class_name']!r} is for OnPolicyRunner: it has no buffer")
