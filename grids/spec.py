"""The grid specification: everything that one YAML file may say, and the bounds on it.

Every model is strict: unknown keys are refused, and every number has bounds. Settings that the paper (arXiv 2603.12151) does not
publish are ordinary fields with documented defaults, never constants hidden in code.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

PositiveInt = Annotated[int, Field(ge=1, le=2**31 - 1, strict=True)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1, strict=True)]


class StrictModel(BaseModel):
    """A frozen pydantic model that refuses unknown keys and infinite numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class ModelSpec(StrictModel):
    """The base model that every cell starts from."""

    path: str = Field(min_length=1)
    """A model folder (relative paths start at the YAML file), or a model's name on the Hugging Face hub."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the sampler's weights and of the learner's forward pass; master weights and optimiser are always float32."""


class ProblemsSpec(StrictModel):
    """Problem sets, JSONL or Parquet, with columns ``prompt``/``answer`` or in verl's layout."""

    train: str = Field(min_length=1)
    """Training problems; a relative path starts at the YAML file."""
    validation: str = Field(min_length=1)
    """Held-out problems; none may also be in the training set."""


class PowersOfTwo(StrictModel):
    """All powers of two between two bounds, both included."""

    from_: PositiveInt = Field(alias="from")
    """Smallest value, a power of two."""
    to: PositiveInt
    """Largest value, a power of two."""

    @field_validator("from_", "to")
    @classmethod
    def _is_power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError(f"{value} is no power of two; give a list for other values")
        return value

    @model_validator(mode="after")
    def _is_ordered(self) -> "PowersOfTwo":
        if self.from_ > self.to:
            raise ValueError(f"'from' ({self.from_}) is larger than 'to' ({self.to})")
        return self

    @property
    def values(self) -> list[int]:
        """The powers of two, ascending."""
        return [2**e for e in range(self.from_.bit_length() - 1, self.to.bit_length())]


def _axis_form(value: object) -> str:
    return "powers" if isinstance(value, dict | PowersOfTwo) else "values"


# Told apart by their form before they are checked, so that an error speaks of the form that the user wrote.
Axis = Annotated[
    Annotated[PowersOfTwo, Tag("powers")] | Annotated[list[PositiveInt], Field(min_length=1), Tag("values")],
    Discriminator(_axis_form),
]


class GridAxes(StrictModel):
    """The axes of the grid. Cells are all combinations whose batch B = B_p * n is at most ``max_batch_rollouts``."""

    problems_per_batch: Axis
    """B_p, unique problems in a batch: a list, or ``{from: 32, to: 1024}`` for powers of two."""
    rollouts_per_problem: Axis
    """n, the GRPO group size: a list, or powers of two. n = 1 is refused: a group of one has no advantage."""
    seeds: list[NonNegativeInt] = Field(default=[0], min_length=1)
    """A seed varies the order of problems and the sampling; cells of one seed share their order of problems."""
    max_batch_rollouts: PositiveInt = 65_536
    """B_max, the largest batch B = B_p * n."""
    compute_rollouts: PositiveInt
    """C_max, training rollouts of each cell. M = C_max / B update steps, rounded down."""
    canary: bool = False
    """Train two steps of the smallest and of the largest batch alone. Set by ``plan --canary``, never in a YAML file."""

    @field_validator("rollouts_per_problem")
    @classmethod
    def _has_groups(cls, axis: PowersOfTwo | list[int]) -> PowersOfTwo | list[int]:
        smallest = axis.from_ if isinstance(axis, PowersOfTwo) else min(axis)
        if smallest < 2:
            raise ValueError("n = 1 has no group to normalise against; the smallest group is 2")
        return axis

    @field_validator("problems_per_batch", "rollouts_per_problem", "seeds")
    @classmethod
    def _has_no_duplicates(cls, axis: PowersOfTwo | list[int]) -> PowersOfTwo | list[int]:
        if isinstance(axis, list) and len(set(axis)) != len(axis):
            raise ValueError("a value stands twice; remove one")
        return axis


class Recipe(StrictModel):
    """What the loss holds besides the policy term (PAPER: the coefficients are not published)."""

    kl_coefficient: float = Field(ge=0, le=10)
    """Weight of the k3 estimate of KL(policy || base model)."""
    entropy_coefficient: float = Field(ge=0, le=10)
    """Weight of the entropy bonus (subtracted from the loss)."""
    tis_cap: float = Field(default=2.0, gt=0, le=1e3)
    """Cap of the truncated importance weight p_learner / p_sampler of a token."""
    zero_variance_filter: Literal["off", "all", "regularisers"] = "off"
    """Groups whose rewards are all equal: keep them, drop them from the loss, or drop them from KL and entropy terms only."""


class EasyRecipe(Recipe):
    """The paper's recipe for easy sets: KL loss and entropy loss on, no zero-variance filter."""

    type: Literal["easy"]
    """Names the recipe."""
    kl_coefficient: float = Field(default=1e-3, ge=0, le=10)
    """Weight of the k3 estimate of KL(policy || base model)."""
    entropy_coefficient: float = Field(default=1e-3, ge=0, le=10)
    """Weight of the entropy bonus (subtracted from the loss)."""


class HardRecipe(Recipe):
    """The paper's recipe for hard sets: neither KL nor entropy loss, no zero-variance filter."""

    type: Literal["hard"]
    """Names the recipe."""
    kl_coefficient: float = Field(default=0.0, ge=0, le=10)
    """Weight of the k3 estimate of KL(policy || base model)."""
    entropy_coefficient: float = Field(default=0.0, ge=0, le=10)
    """Weight of the entropy bonus (subtracted from the loss)."""


class OptimiserSpec(StrictModel):
    """AdamW, its learning rate scaled with the batch, constant after a linear warm-up.

    A constant rate is what makes a prefix of a run equal the shorter run, so that one cell visits every smaller budget.
    """

    learning_rate: float = Field(gt=0, le=1)
    """Base learning rate, at the anchor batch."""
    anchor_batch_rollouts: PositiveInt = 1024
    """The batch B, in rollouts, at which the base learning rate holds."""
    scaling: Literal["sqrt", "linear", "constant"] = "sqrt"
    """How the learning rate grows with B / anchor."""
    warmup_steps: NonNegativeInt = 10
    """Steps of linear warm-up; step s of w uses s/w of the rate."""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """AdamW's decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first decay rate."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """AdamW's second decay rate."""
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's epsilon."""
    max_gradient_norm: float = Field(default=1.0, gt=0, le=1e6)
    """Gradients are clipped to this global norm."""


class SamplingSpec(StrictModel):
    """How rollouts are drawn, in training and in validation alike."""

    temperature: float = Field(default=0.6, gt=0, le=10)
    """Sampling temperature; the learner's log-probabilities use it too."""
    top_p: float = 1.0
    """Must be 1: see the message."""
    max_tokens: PositiveInt
    """Longest response, in tokens; a response that reaches it without an end token is truncated."""
    prompt_template: str = "{prompt}"
    """Text of the user turn; ``{prompt}`` stands for the problem."""
    system_prompt: str | None = None
    """System turn put before the user turn."""
    stop_tokens: list[Annotated[str, Field(min_length=1)]] = []
    """Tokens, besides the model's own end tokens, that end a response."""
    truncated_answer: Literal["zero", "graded"] = "zero"
    """What a truncated response scores: 0, or whatever the verifier says."""

    @field_validator("top_p")
    @classmethod
    def _samples_from_the_policy(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                "top_p must be 1: cutting the tail samples from another distribution than the one that the learner "
                "differentiates, which biases every importance ratio; remove the key"
            )
        return value

    @field_validator("prompt_template")
    @classmethod
    def _names_the_prompt(cls, value: str) -> str:
        if value.count("{prompt}") != 1:
            raise ValueError("must hold {prompt} exactly once")
        return value


class VerifierSpec(StrictModel):
    """How a response is graded."""

    type: Literal["math", "exact"] = "math"
    """``math``: math-verify decides whether the answers are equal. ``exact``: the whole response equals the answer."""
    workers: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """Killable grading processes."""
    time_limit_seconds: float = Field(default=5.0, gt=0, le=600)
    """A response that takes longer to grade scores 0 and is counted."""


class TrainProbeSpec(StrictModel):
    """A fixed, evenly spaced choice of training problems that is sampled at every evaluation, the same for all cells.

    Its scores show how training spreads over the problems (the paper's histograms) and, beside the validation's, overfitting.
    """

    problems: Annotated[int, Field(ge=0, le=100_000, strict=True)] = 64
    """Training problems in the probe; all of a smaller set. 0 leaves the probe out."""
    samples_per_problem: Annotated[int, Field(ge=1, le=1024, strict=True)] = 8
    """Answers to each; scores can be compared only at an equal number."""


class EvaluationSpec(StrictModel):
    """Validation at compute marks that all cells share.

    Marks are ``first_mark * 2^(j / marks_per_doubling)``, j = 0, 1, ..., whatever the budget is. A cell evaluates at its first
    step whose compute C reaches a mark; marks that fall on one step make one evaluation.
    """

    samples_per_problem: Annotated[int, Field(ge=1, le=1024, strict=True)] = 4
    """k of avg@k, best@k and worst@k."""
    first_mark: PositiveInt
    """The first mark, in training rollouts."""
    marks_per_doubling: Annotated[int, Field(ge=1, le=64, strict=True)] = 2
    """Marks for each doubling of compute."""
    kept_rollouts: Annotated[int, Field(ge=0, le=10_000, strict=True)] = 16
    """Rollouts with rewards that are kept of every evaluation, to read and to audit the verifier."""
    train_probe: TrainProbeSpec = TrainProbeSpec()
    """Training problems that are sampled beside the validation problems."""


class SamplerPool(StrictModel):
    """Engines that serve all cells."""

    count: Annotated[int, Field(ge=1, le=100_000, strict=True)] = 1
    """vLLM engines."""
    cpus: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """Cores of each engine. On CPU an engine runs one thread, so that its results can be replayed bit for bit."""
    gpus: Annotated[int, Field(ge=0, le=64, strict=True)] = 0
    """GPUs of each engine; the model is spread over them by tensor parallelism."""
    max_sequences: Annotated[int, Field(ge=1, le=65_536, strict=True)] = 256
    """Sequences that an engine decodes at once; on CPU no more than have room in its cache at their full length."""
    kv_cache_gib: float = Field(default=1.0, gt=0, le=4096)
    """Size of the key-value cache of an engine on CPU; on GPU vLLM takes what is free."""


class LearnerPool(StrictModel):
    """Learner groups, and how many cells each holds: together the number of cells in flight."""

    count: Annotated[int, Field(ge=1, le=100_000, strict=True)] = 1
    """Groups."""
    ranks: Annotated[int, Field(ge=1, le=4096, strict=True)] = 1
    """FSDP ranks of each group."""
    cpus: Annotated[int, Field(ge=1, le=1024, strict=True)] = 1
    """Cores of each rank."""
    gpus: Annotated[int, Field(ge=0, le=1, strict=True)] = 0
    """GPUs of each rank."""
    slots: Annotated[int, Field(ge=1, le=64, strict=True)] = 2
    """Cells that a group holds at once: while one is sampled the other learns. Each takes 12 bytes a parameter of the ranks
    memory together: weights and two moments in float32."""
    micro_batch_tokens: PositiveInt = 16_384
    """Largest micro-batch, in tokens with padding; a longer single sequence makes a micro-batch of its own."""

    @property
    def cells_in_flight(self) -> int:
        """Of all groups together."""
        return self.count * self.slots


class PoolsSpec(StrictModel):
    """The two pools that all cells share."""

    samplers: SamplerPool = SamplerPool()
    """Sampler engines."""
    learners: LearnerPool = LearnerPool()
    """Learner groups."""


class TrackingSpec(StrictModel):
    """Where metrics go."""

    mlflow_uri: str = Field(pattern=r"^https?://")
    """Address of the MLflow server, for example ``http://127.0.0.1:5000``."""


class CommitsSpec(StrictModel):
    """When a cell's weights and optimiser are saved; a crash costs at most the work since the last commit."""

    every_minutes: float = Field(default=30.0, gt=0, le=10_000)
    """A commit follows the first step that ends this long after the last commit."""
    every_steps: PositiveInt = 1_000_000
    """A commit follows at the latest after so many steps."""
    keep: Annotated[int, Field(ge=1, le=1000, strict=True)] = 2
    """Checkpoints kept of each cell."""


class FailuresSpec(StrictModel):
    """What may go wrong before a cell is given up. Counts start anew with each commit that a cell gets further."""

    phase_repeats: Annotated[int, Field(ge=0, le=100, strict=True)] = 2
    """How often one phase of sampling or grading is repeated after its engine or grader was lost or failed."""
    own_failures: Annotated[int, Field(ge=0, le=1000, strict=True)] = 3
    """New attempts after a failure of the cell's own: a learner that died or hung, an error of no known kind."""
    preemptions: Annotated[int, Field(ge=0, le=100_000, strict=True)] = 100
    """New attempts after the loss of a node."""
    backoff_seconds: float = Field(default=2.0, ge=0, le=3600)
    """Wait before the first new attempt; doubled for each further one."""
    longest_backoff_seconds: float = Field(default=300.0, ge=0, le=86_400)
    """Largest wait before a new attempt."""
    stall_seconds: float = Field(default=600.0, ge=1, le=86_400)
    """A phase in which nothing moves for so long has failed: its process is dumped, ended and started again."""
    start_seconds: float = Field(default=1800.0, ge=1, le=86_400)
    """Longest start of an engine, learner group or grader, once the cluster has given it its place, and longest load or save
    of a checkpoint."""
    grace_seconds: float = Field(default=1.5, ge=0, le=86_400)
    """What cells get to commit when the run is told to stop. Ray kills a stopped job after 3 seconds by default."""
    collapsed_steps: PositiveInt = 200
    """A cell whose every reward was zero in so many steps on end, after better ones, has diverged."""


class GridSpec(StrictModel):
    """One grid: what a YAML file holds."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    """Name of the grid: its run folder and its MLflow experiment."""
    model: ModelSpec
    """The base model."""
    problems: ProblemsSpec
    """Training and validation problems."""
    grid: GridAxes
    """The axes."""
    recipe: Annotated[EasyRecipe | HardRecipe, Field(discriminator="type")]
    """The loss."""
    optimiser: OptimiserSpec
    """The optimiser."""
    sampling: SamplingSpec
    """How rollouts are drawn."""
    verifier: VerifierSpec = VerifierSpec()
    """How responses are graded."""
    evaluation: EvaluationSpec
    """When and how cells are validated."""
    pools: PoolsSpec = PoolsSpec()
    """Samplers and learners."""
    tracking: TrackingSpec
    """MLflow."""
    commits: CommitsSpec = CommitsSpec()
    """Checkpoints."""
    failures: FailuresSpec = FailuresSpec()
    """Retries, time limits, and when a cell has diverged."""
    assumptions: list[str] = []
    """Settings that a publication leaves open, in words; ``plan`` repeats them."""
