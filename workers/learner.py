"""One rank of a learner group: FSDP2 training of the cells in its slots, one after the other."""

import datetime
import math
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from workers import checkpoints, grpo, policy
from workers.learning import Diverged, LearnerSettings, StaleRollouts
from workers.packing import pack_weights
from workers.rollouts import Rollouts
from workers.weights import Weights, version_step

COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=5)
"""A dead rank hangs the others in their next collective for at most so long."""


@dataclass
class _Slot:
    """A cell's training state while it is not in the model."""

    version: str
    """Name of its weights."""
    optimiser: torch.optim.AdamW
    """Its own: moments and step counts need no switch."""
    shards: list[torch.Tensor]
    """Its weights, of this rank, while another slot's are in the model; else what that one left there before."""


class LearnerRank:
    """A rank. All ranks of a group are called with the same arguments and take part in each call.

    It holds a cell in each slot. All slots share one model, whose weights are exchanged when a call is for another slot than the
    one before; each has an optimiser of its own.
    """

    beats = 0
    """Signs of progress so far: micro-batches, optimiser steps, packed parameters, checkpoints saved and loaded. Another thread may
    read it at any time."""

    def __init__(self, settings: LearnerSettings, rank: int, ranks: int) -> None:
        """Hold the settings; ``join`` connects the group."""
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._rank = rank
        self._ranks = ranks
        self._device = torch.device("cuda" if settings.on_gpu else "cpu")

    def open_store(self) -> tuple[str, int]:
        """On rank 0: open the group's meeting point and return its (host, port).

        The port is the system's choice, made by the socket that then listens on it: two groups cannot race for one.
        """
        host = ray.util.get_node_ip_address()
        listener = socket.create_server((host, 0))
        port: int = listener.getsockname()[1]
        # With a socket of our own the store listens on this address alone, not on all of the machine's.
        self._store = dist.TCPStore(
            host,
            port,
            self._ranks,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return host, port

    def join(self, host: str, port: int) -> None:
        """Connect to the group and load the base model."""
        settings = self._settings
        if self._rank > 0:
            self._store = dist.TCPStore(host, port, self._ranks, is_master=False)
        dist.init_process_group(
            "nccl" if settings.on_gpu else "gloo",
            store=self._store,
            rank=self._rank,
            world_size=self._ranks,
            timeout=COLLECTIVE_TIMEOUT,
        )
        mesh = init_device_mesh(self._device.type, (self._ranks,))
        self._model = self._load_sharded(mesh)
        self._base_model = self._load_sharded(mesh) if settings.recipe.kl_coefficient else None
        self._base_shards = [local_shard(p).to("cpu", copy=True) for p in self._model.parameters()]
        self._slots: dict[int, _Slot] = {}
        self._present: _Slot | None = None
        """The slot whose weights are in the model."""

    def _load_sharded(self, mesh: dist.DeviceMesh) -> torch.nn.Module:
        model = policy.load_policy(self._settings.model.path).to(self._device)
        return policy.shard_policy(model, mesh, self._settings.model.dtype)

    def begin_cell(self, slot: int, version: str, checkpoint: Path | None) -> tuple[str, Weights | None]:
        """Take up a cell from its checkpoint, or from the base model with a fresh optimiser.

        Args:
            slot: where it stays; what was there is forgotten.
            version: name of the weights at this point.
            checkpoint: a complete checkpoint folder, or None.

        Returns:
            (``version``, the weights on rank 0 and None elsewhere).
        """
        if slot not in self._slots:
            shards = [torch.empty_like(local_shard(p)) for p in self._model.parameters()]
            self._slots[slot] = _Slot(version, self._new_optimiser(), shards)
        begun = self._bring(slot)
        begun.optimiser = self._new_optimiser()
        with torch.no_grad():
            for parameter, shard in zip(self._model.parameters(), self._base_shards, strict=True):
                local_shard(parameter).copy_(shard)
        if checkpoint is not None:
            checkpoints.load(checkpoint, self._model, begun.optimiser)
            self.beats += 1
        begun.version = version
        return version, self._pack(version)

    def _new_optimiser(self) -> torch.optim.AdamW:
        settings = self._settings.optimiser
        return torch.optim.AdamW(
            self._model.parameters(),
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
        )

    @torch.no_grad()
    def _bring(self, slot: int) -> _Slot:
        """The slot, once its weights are in the model."""
        wanted, present = self._slots[slot], self._present
        if wanted is not present:
            for number, parameter in enumerate(self._model.parameters()):
                shard = local_shard(parameter)
                if present is not None:
                    present.shards[number].copy_(shard)
                shard.copy_(wanted.shards[number])
            self._present = wanted
        return wanted

    def update(
        self, slot: int, version: str, learning_rate: float, rollouts: Rollouts, rewards: np.ndarray
    ) -> tuple[dict[str, float], Weights | None]:
        """One GRPO update on one batch.

        A batch without any gradient still makes a step: AdamW's moments decay and its step count rises, so that the number of
        updates is a function of compute alone.

        Args:
            slot: the cell's.
            version: name of the weights after the update.
            learning_rate: of this step.
            rollouts: G groups of n, sampled from exactly the slot's present weights.
            rewards: [R] float32.

        Returns:
            (metrics of the batch, the new weights on rank 0 and None elsewhere). ``metrics`` are columns of the history.

        Raises:
            StaleRollouts: the rollouts were made by other weights.
            Diverged: the loss or the gradient is not finite; the weights are unchanged.
        """
        started = time.monotonic()
        trained = self._bring(slot)
        if rollouts.weights_version != trained.version:
            raise StaleRollouts(f"rollouts of {rollouts.weights_version} for a learner at {trained.version}")
        metrics = self.backward(rollouts, rewards)
        # This update's own number says which weights it is to learn on.
        metrics["staleness"] = float(version_step(version) - 1 - version_step(rollouts.weights_version))
        norm = torch.nn.utils.clip_grad_norm_(
            self._model.parameters(), self._settings.optimiser.max_gradient_norm
        )
        metrics["grad_norm"] = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(metrics["loss"]) or not math.isfinite(metrics["grad_norm"]):
            raise Diverged(f"loss {metrics['loss']}, gradient norm {metrics['grad_norm']}")
        for group in trained.optimiser.param_groups:
            group["lr"] = learning_rate
        trained.optimiser.step()
        self.beats += 1
        trained.version = version
        weights = self._pack(version)
        return metrics | {
            "learning_rate": learning_rate,
            "seconds_learning": time.monotonic() - started,
        }, weights

    def backward(self, rollouts: Rollouts, rewards: np.ndarray) -> dict[str, float]:
        """Gradients of the loss over the whole batch, left in the parameters, and the batch's metrics."""
        recipe = self._settings.recipe
        n = rollouts.rollouts_per_problem
        grouped = rewards.reshape(-1, n)
        advantages = grpo.group_advantages(grouped).reshape(-1)
        weights = grpo.token_weights(grouped, rollouts.lengths, recipe.zero_variance_filter)
        computed = grpo.contributing(
            advantages,
            weights,
            kl_coefficient=recipe.kl_coefficient,
            entropy_coefficient=recipe.entropy_coefficient,
        )
        if not computed.any():
            computed[:n] = True  # with weights of zero: something must show that sampler and learner agree
        plan = grpo.plan_update(
            np.flatnonzero(computed),
            np.asarray([len(prompt) for prompt in rollouts.prompts]),
            rollouts.lengths,
            rollouts.rollouts_per_problem,
            longest=policy.shared_row_tokens(self._model),
            ranks=self._ranks,
            token_budget=self._settings.micro_batch_tokens,
        )[self._rank]
        self._model.zero_grad()
        sums = torch.zeros(len(_SUMS), dtype=torch.float64)
        largest = 0.0
        for position, rows in enumerate(plan):
            self._model.set_requires_gradient_sync(position == len(plan) - 1)
            if not rows:
                # Take part in the collectives of the other ranks, with a single token and no weight.
                token = torch.zeros((1, 1), dtype=torch.int64, device=self._device)
                if self._base_model is not None:
                    self._base_model(input_ids=token)
                (self._model(input_ids=token).logits.sum() * 0.0).backward()
                self.beats += 1
                continue
            batch = policy.ResponseBatch(rollouts, rows, self._device)
            terms = self._terms(batch, rollouts, advantages, weights)
            loss = grpo.grpo_loss(
                terms,
                kl_coefficient=recipe.kl_coefficient,
                entropy_coefficient=recipe.entropy_coefficient,
                tis_cap=recipe.tis_cap,
            )
            # FSDP averages gradients over ranks; the loss is a sum over them.
            (loss * self._ranks).backward()
            self.beats += 1
            sums += _micro_batch_sums(loss, terms, recipe.tis_cap)
            differences = (terms.logprobs.detach() - terms.sampler_logprobs).abs()
            # numpy's maximum, unlike Python's, hands on what is no number.
            largest = float(np.maximum(largest, float(differences.max())))
        return self._batch_metrics(sums, largest, rollouts, grouped, computed)

    def gradients(self) -> dict[str, np.ndarray]:
        """Whole gradients of the last ``backward`` by parameter, as float32; all ranks ask together."""
        return {
            name: (gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
            .float()
            .cpu()
            .numpy()
            for name, parameter in self._model.named_parameters()
            if (gradient := parameter.grad) is not None
        }

    def _terms(
        self,
        batch: policy.ResponseBatch,
        rollouts: Rollouts,
        advantages: np.ndarray,
        weights: grpo.TokenWeights,
    ) -> grpo.TokenTerms:
        temperature = self._settings.temperature
        base_logprobs = None
        if self._base_model is not None:
            with torch.no_grad():
                base_logprobs, _ = policy.response_statistics(self._base_model, batch, temperature)
        entropy_gradient = self._settings.recipe.entropy_coefficient > 0
        logprobs, entropies = policy.response_statistics(self._model, batch, temperature, entropy_gradient)

        def of_responses(values: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(values[batch.response_index]).to(self._device, logprobs.dtype)

        return grpo.TokenTerms(
            logprobs=logprobs,
            entropies=entropies,
            sampler_logprobs=torch.from_numpy(rollouts.logprobs[batch.token_index]).to(self._device),
            base_logprobs=base_logprobs,
            advantages=of_responses(advantages),
            policy_weights=of_responses(weights.policy),
            regulariser_weights=of_responses(weights.regulariser),
        )

    def _batch_metrics(
        self,
        sums: torch.Tensor,
        largest: float,
        rollouts: Rollouts,
        rewards: np.ndarray,
        computed: np.ndarray,
    ) -> dict[str, float]:
        """Columns of the history. What needs the learner's forward pass is a mean over the tokens of ``computed`` [R] responses."""
        if self._ranks > 1:
            sums = sums.to(self._device)
            dist.all_reduce(sums)
            maximum = torch.tensor(largest, dtype=torch.float64, device=self._device)
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
            largest = float(maximum)
        total = dict(zip(_SUMS, sums.tolist(), strict=True))
        tokens = int(rollouts.lengths[computed].sum())
        # -log p of sampled tokens has the entropy for its expectation, over all of them: which groups are left out depends on
        # their answers, so exact entropies of the others would be those of a chosen part.
        entropy = (
            total["entropy"] / tokens if computed.all() else -float(rollouts.logprobs.mean(dtype=np.float64))
        )
        flat = grpo.zero_variance(rewards)
        metrics = {
            "loss": total["loss"],
            "computed_share": float(computed.mean()),
            "entropy": entropy,
            "importance_ratio": total["importance_ratio"] / tokens,
            "tis_capped": total["tis_capped"] / tokens,
            "logprob_difference": largest,
            "logprob_mean_difference": total["logprob_difference"] / tokens,
            "train_reward": float(rewards.mean()),
            "response_tokens": float(rollouts.lengths.mean()),
            "truncated": float(rollouts.truncated.mean()),
            "zero_variance_right": float((flat & (rewards[:, 0] > 0)).mean()),
            "zero_variance_wrong": float((flat & (rewards[:, 0] <= 0)).mean()),
        }
        if self._base_model is not None:
            metrics["kl"] = total["kl"] / tokens
        return metrics

    def logprobs(self, slot: int, rollouts: Rollouts) -> np.ndarray:
        """[T] the log-probabilities of all response tokens under a slot's weights, at the sampling temperature."""
        self._bring(slot)
        result = np.zeros(len(rollouts.tokens), dtype=np.float32)
        for index in range(len(rollouts.lengths)):
            batch = policy.ResponseBatch(rollouts, [np.asarray([index])], self._device)
            with torch.no_grad():
                values, _ = policy.response_statistics(self._model, batch, self._settings.temperature)
            result[batch.token_index] = values.cpu().numpy()
            self.beats += 1
        return result

    def perturb(self, slot: int, version: str) -> tuple[str, Weights | None]:
        """Change every weight of a slot a little (see ``policy.perturb_``) for the start-up probe; ``begin_cell`` undoes it."""
        perturbed = self._bring(slot)
        policy.perturb_(self._model)
        perturbed.version = version
        return version, self._pack(version)

    def save(self, slot: int, folder: Path) -> None:
        """Write a slot's weights and optimiser to an empty folder; the caller marks it complete.

        Raises:
            checkpoints.StorageFull: on every rank, when the storage of any rank takes no more.
        """
        checkpoints.save(folder, self._model, self._bring(slot).optimiser)
        self.beats += 1

    def _pack(self, version: str) -> Weights | None:
        parameters = self._counted(policy.full_parameters(self._model))
        if self._rank == 0:
            return pack_weights(version, self._settings.model.dtype, parameters)
        for _ in parameters:
            pass
        return None

    def _counted(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in parameters:
            yield parameter
            self.beats += 1


_SUMS = ("loss", "entropy", "kl", "importance_ratio", "tis_capped", "logprob_difference")
"""What a micro-batch adds to: sums over tokens, except for the loss, whose weights make it a mean."""


def _micro_batch_sums(loss: torch.Tensor, terms: grpo.TokenTerms, tis_cap: float) -> torch.Tensor:
    ratios = grpo.importance_ratios(terms)
    kl = (
        0.0
        if terms.base_logprobs is None
        else float(grpo.k3(terms.base_logprobs, terms.logprobs.detach()).sum())
    )
    return torch.tensor(
        [
            float(loss.detach()),
            float(terms.entropies.detach().sum()),
            kl,
            float(ratios.sum()),
            float((ratios > tis_cap).sum()),
            float((terms.logprobs.detach() - terms.sampler_logprobs).abs().sum()),
        ],
        dtype=torch.float64,
    )


def local_shard(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded parameter."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter
