"""What the policy says of response tokens, against plain forward passes of single sequences."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_models import make_model
from workers import policy
from workers.rollouts import Rollouts


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "rows",
    [
        [[0], [1], [3]],
        [[0, 1], [3]],
        [[0, 1], [2, 3]],
        [[3], [1, 0]],
        # Several problems in a row, and one twice.
        [[2, 0, 1], [3]],
        [[0, 1, 2, 3]],
        [[0, 3, 1, 2], [2]],
    ],
)
def test_statistics_of_a_batch_are_those_of_each_sequence_alone_also_where_responses_share_a_row(
    tmp_path: Path, tied: bool, rows: list[list[int]]
) -> None:
    model = policy.load_policy(str(make_model(tmp_path, tied=tied)))
    prompts = [np.array([3, 4, 5], dtype=np.int32), np.array([6, 7, 8, 9, 10, 11], dtype=np.int32)]
    lengths = np.array([2, 5, 1, 4])
    tokens = np.arange(lengths.sum(), dtype=np.int32) % 11 + 1
    rollouts = Rollouts(
        2, prompts, tokens, np.zeros(12, np.float32), lengths, np.zeros(4, bool), [""] * 4, "v"
    )
    chosen = [response for row in rows for response in row]
    batch = policy.ResponseBatch(rollouts, [np.array(row) for row in rows], torch.device("cpu"))
    expected_index = [np.arange(rollouts.offsets[i], rollouts.offsets[i + 1]) for i in chosen]
    np.testing.assert_array_equal(batch.token_index, np.concatenate(expected_index))
    np.testing.assert_array_equal(batch.response_index, np.repeat(chosen, lengths[chosen]))
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


def test_rows_are_shared_up_to_the_models_width_and_not_where_attention_looks_over_a_window(
    tmp_path: Path,
) -> None:
    model = policy.load_policy(str(make_model(tmp_path, tied=True)))
    assert policy.shared_row_tokens(model) == model.config.hidden_size
    model.config.hidden_size = 10**6
    assert policy.shared_row_tokens(model) == policy.LONGEST_SHARED_ROW
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert policy.shared_row_tokens(model) == 0
    model.config.layer_types = None
    model.config.sliding_window = 4096
    assert policy.shared_row_tokens(model) == 0
    model.config.sliding_window = None
    assert policy.shared_row_tokens(model) > 0
    model._supports_sdpa = False  # as that of models without attention
    assert policy.shared_row_tokens(model) == 0
