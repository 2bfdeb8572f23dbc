"""LeRobot's replay buffer, with its names: ``from gpubuf.integrations.lerobot import ReplayBuffer``.

LeRobot is at https://github.com/huggingface/lerobot; its buffer is in ``lerobot/rl/buffer.py``.
"""

from gpubuf.integrations.lerobot.buffer import ReplayBuffer

__all__ = ["ReplayBuffer"]
