"""Train a small ACT policy of LeRobot on a trace: python examples/train_lerobot.py TRACE [STEPS]

Needs lerobot[dataset] (Python 3.12) and gym-trace[lerobot]. Prints the size of the dataset, and the loss before and
after.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from lerobot.datasets.dataset_metadata import LeRobotDatasetMetadata
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy
from lerobot.policies.factory import make_pre_post_processors
from lerobot.utils.feature_utils import dataset_to_policy_features

import gym_trace

AHEAD = 8  # actions per prediction
STATE, WORLD = "observation.state", "observation.environment_state"  # ACT needs STATE, and WORLD or an image


def train(trace: str, steps: int = 20) -> tuple[float, float]:
    """Return the mean loss of the first and of the last five steps."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as place:
        report = gym_trace.export(trace, Path(place) / "data", "lerobot")
        fps = LeRobotDatasetMetadata("data", root=report.path).fps
        ahead = {"action": [step / fps for step in range(AHEAD)]}
        dataset = LeRobotDataset("data", root=report.path, video_backend="pyav", delta_timestamps=ahead)
        print(f"{dataset.num_episodes} episodes, {len(dataset)} steps at {fps} a second, {sorted(dataset.features)}")
        features, stats = dict(dataset.features), dict(dataset.meta.stats)
        if not dataset.meta.camera_keys:  # without images, pass the robot state as the world state
            features[WORLD], stats[WORLD] = features[STATE], stats[STATE]
        shown = dataset_to_policy_features(features)
        config = ACTConfig(
            input_features={name: feature for name, feature in shown.items() if name.startswith("observation")},
            output_features={"action": shown["action"]},
            chunk_size=AHEAD,
            n_action_steps=AHEAD,
            dim_model=64,
            n_heads=4,
            dim_feedforward=128,
            n_encoder_layers=1,
            n_vae_encoder_layers=1,
            pretrained_backbone_weights=None,
            device="cpu",
        )
        policy = ACTPolicy(config)
        before, _ = make_pre_post_processors(config, dataset_stats=stats)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
        losses: list[float] = []
        policy.train()
        while len(losses) < steps:
            for batch in torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True):
                seen = {**batch, WORLD: batch[STATE]} if WORLD in features else batch
                for name, feature in {**config.input_features, **config.output_features}.items():
                    seen[name] = seen[name].float()
                    if feature.shape == (1,):  # LeRobot drops this dimension
                        seen[name] = seen[name].unsqueeze(-1)
                loss, _ = policy.forward(before(seen))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if len(losses) == steps:
                    break
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    print(f"ACT: loss {first:.3f} at first, {last:.3f} after {steps} steps")
    return first, last


if __name__ == "__main__":
    train(sys.argv[1], *map(int, sys.argv[2:]))
