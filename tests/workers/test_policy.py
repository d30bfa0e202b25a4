"""What the policy says of response tokens, against plain forward passes of single sequences."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_models import make_model
from workers import policy
from workers.rollouts import Rollouts


@pytest.mark.parametrize("tied", [True, False])
def test_statistics_of_a_padded_batch_are_those_of_each_sequence_alone(tmp_path: Path, tied: bool) -> None:
    model = policy.load_policy(str(make_model(tmp_path, tied=tied)))
    prompts = [np.array([3, 4, 5], dtype=np.int32), np.array([6, 7, 8, 9, 10, 11], dtype=np.int32)]
    lengths = np.array([2, 5, 1, 4])
    tokens = np.arange(lengths.sum(), dtype=np.int32) % 11 + 1
    rollouts = Rollouts(
        2, prompts, tokens, np.zeros(12, np.float32), lengths, np.zeros(4, bool), [""] * 4, "v"
    )
    chosen = np.array([0, 1, 3])
    batch = policy.ResponseBatch(rollouts, chosen, torch.device("cpu"))
    with torch.no_grad():
        logprobs, entropies = policy.response_statistics(model, batch, temperature=0.7)
    expected_logprobs, expected_entropies = [], []
    for index in chosen:
        prompt = prompts[index // 2]
        response = tokens[rollouts.offsets[index] : rollouts.offsets[index + 1]]
        sequence = torch.tensor(np.concatenate([prompt, response])[None].astype(np.int64))
        with torch.no_grad():
            logits = model(input_ids=sequence).logits[0].double().numpy() / 0.7
        for position, token in enumerate(response, start=len(prompt) - 1):
            probabilities = np.exp(logits[position]) / np.exp(logits[position]).sum()
            expected_logprobs.append(np.log(probabilities[token]))
            expected_entropies.append(-(probabilities * np.log(probabilities)).sum())
    np.testing.assert_allclose(logprobs.numpy(), expected_logprobs, atol=1e-5)
    np.testing.assert_allclose(entropies.numpy(), expected_entropies, atol=1e-5)
