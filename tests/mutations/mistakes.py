"""One-line mistakes in training, data, likelihood, evaluation and sampling, each with a test that must catch it.

A mistake is a piece of text of a source file, which must occur there exactly once, and what replaces it. A change of
such a line changes the record too: `tests/unit/test_mutations.py` fails where one no longer applies.
"""

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "sedd"


class Mistake(NamedTuple):
    """A mistake that somebody could make, and the test that must fail with it."""

    name: str
    file: str
    """Under src/sedd."""
    old: str
    new: str
    test: str
    """Name of a test as pytest takes it, under tests."""


def problem(mistake: Mistake) -> str | None:
    """Return why a record no longer applies, or None if it does."""
    source = PACKAGE / mistake.file
    count = source.read_text().count(mistake.old) if source.is_file() else 0
    if count != 1:
        return f"its text occurs {count} times in {mistake.file}, not once"
    file, _, name = mistake.test.partition("::")
    path = ROOT / "tests" / file
    if not path.is_file() or (name and f"def {name.partition('[')[0]}(" not in path.read_text()):
        return f"there is no test {mistake.test}"
    return None


TRAINING, OPTIMIZER = "unit/test_training.py", "unit/test_optimizer.py"
ONE_STEP = f"{TRAINING}::test_a_step_is_loss_gradient_clipping_adamw_and_ema"
LEARNING_RATES = f"{OPTIMIZER}::test_learning_rates_by_hand"
AVERAGED = f"{TRAINING}::test_samples_validation_and_loading_use_averaged_weights"
DROPOUT = f"{TRAINING}::test_dropout_is_a_function_of_seed_step_and_rank"
STREAMS = f"{TRAINING}::test_every_use_of_random_numbers_has_a_stream_of_its_own"
BATCHES = f"{TRAINING}::test_batches_follow_the_order_of_blocks_and_the_noise_of_every_step_is_new"
BITS = f"{TRAINING}::test_bits_per_character_of_characters_of_two_bytes"
HELD_OUT_NUMBERS = "integration/test_held_out.py"
HELD_OUT = f"{TRAINING}::test_evaluation_of_a_run_never_sees_training_data"
VALIDATION = f"{TRAINING}::test_validation_never_sees_training_data"
RATES_OF_A_RUN = f"{TRAINING}::test_the_learning_rate_of_every_step_is_logged_and_is_that_of_the_schedule"
OVERFITTING = "integration/test_overfitting.py"
TIMES = "unit/test_process.py::test_weights_of_sampled_times_keep_integrals"
OBJECTIVES, BOUND, TERMS = "exact/test_objectives.py", "exact/test_bound.py", "exact/test_likelihood.py"
ESTIMATE = "exact/test_estimate.py"
DRAWS = "exact/test_sampler_distributions.py"
BESIDE = "integration/test_beside_training.py"
KILLED = "integration/test_killed.py::test_a_killed_run_resumes_bit_for_bit[absorbing-between checkpoints]"

MISTAKES = [
    # What clients may do to a server -----------------------------------------------------------------------
    Mistake(
        "each gap is limited, and not their sum",
        "generate/template.py",
        "    if total > longest:",
        "    if total > longest * 10**9:",
        "unit/test_generate.py::test_the_gaps_of_a_template_together_fit_into_the_model",
    ),
    Mistake(
        "rows enter in the order of their arrival, whoever sent them",
        "serve/fair.py",
        "self._items.setdefault(item.client, {})",
        'self._items.setdefault("", {})',
        "exact/test_engine.py::test_clients_take_turns_at_slots",
    ),
    Mistake(
        "a full queue is full for every client",
        "serve/engine.py",
        "taken = min(self.running + waiting + rows, clients * (share.rows + rows))",
        "taken = self.running + waiting + rows",
        "exact/test_engine.py::test_a_client_that_fills_the_queue_leaves_others_their_share",
    ),
    Mistake(
        "half a request's headers stop its deadline",
        "serve/http.py",
        "        if self._answers or self.transport.is_closing():",
        "        if self._answers or self.transport.is_closing() or self.conn.trailing_data[0]:",
        "integration/test_serve_attacks.py::test_headers_must_arrive_in_time",
    ),
    Mistake(
        "a refused body is not read",
        "serve/guard.py",
        "    if receive:\n",
        "    if False:\n",
        "integration/test_serve_attacks.py::test_a_body_that_is_too_large_gets_its_reply",
    ),
    Mistake(
        "a host is its beginning",
        "serve/guard.py",
        "_HOST.fullmatch(host)",
        "_HOST.match(host)",
        "integration/test_serve_attacks.py::test_a_host_must_be_one_of_the_servers_names",
    ),
    # What is trained and validated on ----------------------------------------------------------------------
    Mistake(
        "sedd eval RUN scores training data",
        "evaluation/corpus.py",
        'TokenBlocks.open(folder, length, "validation", fraction, name=sources)',
        'TokenBlocks.open(folder, length, "train", fraction, name=sources)',
        HELD_OUT,
    ),
    Mistake(
        "sedd eval RUN scores all data",
        "evaluation/corpus.py",
        'TokenBlocks.open(folder, length, "validation", fraction, name=sources)',
        'TokenBlocks.open(folder, length, "all", fraction, name=sources)',
        HELD_OUT,
    ),
    Mistake(
        "validation on training rows",
        "training/datasets.py",
        'open_blocks(folder, "validation")',
        'open_blocks(folder, "train")',
        VALIDATION,
    ),
    Mistake(
        "the trainer validates on its training blocks",
        "training/trainer.py",
        "            self.validation_blocks,\n",
        "            self.blocks,\n",
        VALIDATION,
    ),
    Mistake(
        "training on all data, held-out data too",
        "training/datasets.py",
        'train = open_blocks(folder, "train")',
        'train = open_blocks(folder, "all")',
        f"{TRAINING}::test_the_splits_of_a_run_are_disjoint_and_complete",
    ),
    Mistake(
        "the validation split is the first part",
        "data/packing.py",
        "else (total - held_out, held_out)",
        "else (0, held_out)",
        "unit/test_data.py::test_validation_is_the_tail",
    ),
    Mistake(
        "another fraction is held out in evaluation than in training",
        "evaluation/corpus.py",
        "length, fraction = loaded.config.model.seq_len, loaded.config.data.val_fraction",
        "length, fraction = loaded.config.model.seq_len, 0.05",
        HELD_OUT,
    ),
    Mistake(
        "every epoch has the order of the first",
        "data/packing.py",
        "_permutation(seed, epoch, size)[samples",
        "_permutation(seed, 0, size)[samples",
        "unit/test_data.py::test_orders_differ_by_seed_and_epoch_and_are_uniform",
    ),
    Mistake(
        "batches overlap",
        "training/batches.py",
        "step * self.batch_size, self.batch_size, len(self.blocks)",
        "step, self.batch_size, len(self.blocks)",
        BATCHES,
    ),
    Mistake(
        "every rank trains on the same rows",
        "runtime/distributed.py",
        "slice(self.rank * size, (self.rank + 1) * size)",
        "slice(0, size)",
        "unit/test_labels.py::test_hidden_labels_are_a_function_of_seed_and_step",
    ),
    # Random numbers ----------------------------------------------------------------------------------------
    Mistake(
        "the same noise at every step",
        "training/batches.py",
        "seeded_generator(self.seed, step, NOISE_STREAM)",
        "seeded_generator(self.seed, 0, NOISE_STREAM)",
        BATCHES,
    ),
    Mistake(
        "label dropout with the seed of the noise",
        "training/batches.py",
        "seeded_generator(self.seed, step, LABEL_STREAM)",
        "seeded_generator(self.seed, step, NOISE_STREAM)",
        STREAMS,
    ),
    Mistake(
        "the same labels are hidden at every step",
        "training/batches.py",
        "seeded_generator(self.seed, step, LABEL_STREAM)",
        "seeded_generator(self.seed, 0, LABEL_STREAM)",
        STREAMS,
    ),
    Mistake(
        "two uses of random numbers share a stream",
        "training/batches.py",
        "DROPOUT_STREAM, LABEL_STREAM = 1, 2, 3, 4",
        "DROPOUT_STREAM, LABEL_STREAM = 1, 2, 1, 4",
        STREAMS,
    ),
    Mistake(
        "dropout seeded without the step",
        "training/step.py",
        "seeded_generator(config.seed, state.step, DROPOUT_STREAM, ranks.rank)",
        "seeded_generator(config.seed, 0, DROPOUT_STREAM, ranks.rank)",
        DROPOUT,
    ),
    Mistake(
        "dropout seeded without the rank",
        "training/step.py",
        "seeded_generator(config.seed, state.step, DROPOUT_STREAM, ranks.rank)",
        "seeded_generator(config.seed, state.step, DROPOUT_STREAM, 0)",
        DROPOUT,
    ),
    Mistake(
        "validation noise with the seed of the first step's",
        "training/validation.py",
        "seeded_generator(seed, 0, VALIDATION_STREAM)",
        "seeded_generator(seed, 0, 1)",
        STREAMS,
    ),
    Mistake(
        "all sequences have the noise of the first",
        "likelihood/estimate.py",
        "CounterRNG(self.seed, number)",
        "CounterRNG(self.seed, index)",
        f"{ESTIMATE}::test_every_draw_has_noise_of_its_own",
    ),
    Mistake(
        "all rows of a bound share their noise",
        "likelihood/estimate.py",
        'derive_seed(seed, f"{key} {seen[key]}")',
        "seed",
        "exact/test_bound_per_row.py",
    ),
    Mistake(
        "padding gets noise in a bound",
        "likelihood/estimators.py",
        "*(torch.where(valid, x, x_0) for x in (x_t, x_first))",
        "x_t, x_first",
        "exact/test_bound_per_row.py::test_padding_changes_nothing",
    ),
    Mistake(
        "a bound with dropout",
        "likelihood/estimate.py",
        "        module.training = False\n",
        "        module.training = True\n",
        "exact/test_bound_per_row.py::test_an_autoregressive_model_has_an_exact_value",
    ),
    # Loss, gradient, optimizer, EMA ------------------------------------------------------------------------
    Mistake(
        "batch.weight dropped where the loss is not fused",
        "training/trainer.py",
        "batch.weight.to(loss.dtype)[:, None] * loss",
        "loss",
        ONE_STEP,
    ),
    Mistake(
        "batch.weight replaced by the loss weighting",
        "training/trainer.py",
        "batch._replace(weight=batch.weight * factor)",
        "batch._replace(weight=factor)",
        ONE_STEP,
    ),
    Mistake(
        "batch.weight dropped in the fused score entropy",
        "ops/fused_loss.py",
        "process.incoming_rate * rate * weight.to(dtype)",
        "process.incoming_rate * rate",
        ONE_STEP,
    ),
    Mistake(
        "batch.weight dropped in the fused cross-entropy",
        "ops/fused_loss.py",
        "(weight * c.weight).to(dtype)",
        "c.weight.to(dtype)",
        ONE_STEP,
    ),
    Mistake(
        "each micro-batch is averaged by itself",
        "training/step.py",
        "(total / batch.tokens * ranks.world_size)",
        "(total / micro_batch.valid.sum() * ranks.world_size)",
        ONE_STEP,
    ),
    Mistake(
        "gradients are averaged over ranks, not summed",
        "training/step.py",
        "(total / batch.tokens * ranks.world_size)",
        "(total / batch.tokens)",
        "integration/test_train.py::test_two_processes_compute_what_one_does[DDP]",
    ),
    Mistake(
        "gradients are not clipped",
        "training/step.py",
        "optimizer.clip_grad_norm(trainer.weights, config.optim.grad_clip)",
        "optimizer.clip_grad_norm(trainer.weights, 1e9)",
        ONE_STEP,
    ),
    Mistake(
        "gradients are not dropped after a step",
        "training/step.py",
        "    optimizer.zero_grad(trainer.optimizers)\n",
        "",
        ONE_STEP,
    ),
    Mistake(
        "the learning rate is not set",
        "training/step.py",
        "    optimizer.set_learning_rate(trainer.optimizers, lr)\n",
        "",
        ONE_STEP,
    ),
    Mistake(
        "a step that is not finite is applied",
        "training/step.py",
        "finite = loss.isfinite() & grad_norm.isfinite()",
        "finite = torch.ones_like(loss, dtype=torch.bool)",
        "integration/test_train.py::test_a_loss_that_is_not_finite",
    ),
    Mistake(
        "vectors have weight decay",
        "training/optimizer.py",
        'for w in rest if w.ndim < 2], "weight_decay": 0.0',
        'for w in rest if w.ndim < 2], "weight_decay": config.weight_decay',
        f"{OPTIMIZER}::test_steps_are_clipping_adamw_and_ema",
    ),
    Mistake(
        "the two betas are exchanged",
        "training/optimizer.py",
        "betas = (config.beta1, config.beta2)",
        "betas = (config.beta2, config.beta1)",
        ONE_STEP,
    ),
    Mistake(
        "linear decay ends at 0.9",
        "training/optimizer.py",
        '"linear": 1 - (1 - final_fraction) * progress',
        '"linear": 1 - final_fraction * progress',
        LEARNING_RATES,
    ),
    Mistake(
        "cosine decay over a quarter of the cosine",
        "training/optimizer.py",
        "math.cos(math.pi * progress)",
        "math.cos(math.pi * progress / 2)",
        LEARNING_RATES,
    ),
    Mistake(
        "cosine decay ends at 0",
        "training/optimizer.py",
        '"cosine": final_fraction + (1 - final_fraction)',
        '"cosine": (1 - final_fraction)',
        LEARNING_RATES,
    ),
    Mistake(
        "warmup starts at 0",
        "training/optimizer.py",
        "min(1.0, (step + 1) / config.warmup_steps)",
        "min(1.0, step / config.warmup_steps)",
        LEARNING_RATES,
    ),
    Mistake(
        "no warmup",
        "training/optimizer.py",
        "if config.warmup_steps else 1.0",
        "if config.warmup_steps > 10**6 else 1.0",
        LEARNING_RATES,
    ),
    Mistake(
        "decay over all of the budget, whatever the fraction",
        "training/optimizer.py",
        "(1 - min(max(budget_used, 0.0), 1.0)) / config.decay_fraction)",
        "(1 - min(max(budget_used, 0.0), 1.0)))",
        LEARNING_RATES,
    ),
    Mistake(
        "decay counts tokens of steps that are to come",
        "training/loop.py",
        "optimizer.lr_multiplier(config.optim, state.step, spent)",
        "optimizer.lr_multiplier(config.optim, state.step, 0.0)",
        RATES_OF_A_RUN,
    ),
    Mistake(
        "a run ends one step early",
        "config.py",
        'done = {"steps": step, ',
        'done = {"steps": step + 1, ',
        RATES_OF_A_RUN,
    ),
    Mistake(
        "a key that counts takes a fraction",
        "schema.py",
        "if isinstance(value, str | int | number):",
        "if isinstance(value, str | int | float):",
        "unit/test_hostile_input.py::test_values_of_the_wrong_type",
    ),
    Mistake(
        "a key whose values are text takes a number for its value",
        "training/overrides.py",
        """if value.startswith(("[", "{", '"', "'")):""",
        "if value:",
        "unit/test_hostile_input.py::test_an_assignment_has_the_type_of_its_key",
    ),
    Mistake(
        "the EMA's decay is constant",
        "training/ema.py",
        "return min(self.decay, (1 + step) / (10 + step))",
        "return self.decay",
        f"{OPTIMIZER}::test_the_ema_by_hand",
    ),
    Mistake(
        "the EMA's decay never reaches the configured one",
        "training/ema.py",
        "return min(self.decay, (1 + step) / (10 + step))",
        "return (1 + step) / (10 + step)",
        f"{OPTIMIZER}::test_the_ema_by_hand",
    ),
    Mistake(
        "decay and its complement are exchanged in the EMA",
        "training/ema.py",
        "values, 1 - self.decay_at(step))",
        "values, self.decay_at(step))",
        f"{OPTIMIZER}::test_the_ema_by_hand",
    ),
    Mistake(
        "the EMA is not updated",
        "training/step.py",
        "        trainer.ema.update(pending.step)\n",
        "        pass\n",
        ONE_STEP,
    ),
    # Averaged weights, best checkpoint, resuming -----------------------------------------------------------
    Mistake(
        "samples come from raw weights",
        "training/trainer.py",
        "generate.SamplingRun(self.ema_model, ",
        "generate.SamplingRun(self.model, ",
        AVERAGED,
    ),
    Mistake(
        "raw weights are validated",
        "training/trainer.py",
        "self.validation_model = self.ema_model",
        "self.validation_model = self.model",
        AVERAGED,
    ),
    Mistake(
        "raw weights are loaded",
        "factory.py",
        "stored_weights.load_weights(path, weights)",
        'stored_weights.load_weights(path, "model")',
        AVERAGED,
    ),
    Mistake(
        "the best checkpoint is that of the highest bound",
        "training/state.py",
        "bound < self.best",
        "bound > self.best",
        f"{TRAINING}::test_the_best_checkpoint_is_that_of_the_lowest_bound",
    ),
    Mistake(
        "commands use the last checkpoint of a run that overfits",
        "training/state.py",
        "self.above_best = not is_lowest",
        "self.above_best = False",
        f"{OVERFITTING}::test_commands_use_the_best_checkpoint_and_name_it",
    ),
    Mistake(
        "a checkpoint after the best validation is not used",
        "checkpoint.py",
        'not state.get("above_best") or ',
        "",
        f"{OVERFITTING}::test_a_checkpoint_after_the_best_validation_is_used",
    ),
    Mistake(
        "bounds that are higher by less than their error are overfitting",
        "training/overfitting.py",
        "lowest.nats + lowest.stderr",
        "lowest.nats",
        f"{OVERFITTING}::test_three_bounds_in_a_row_must_be_higher_by_more_than_the_error",
    ),
    Mistake(
        "the moments of the optimizer are not resumed",
        "training/trainer.py",
        'stored["state"].setdefault(name, {})[moment] = value',
        'stored["state"].setdefault(name, {})[moment] = value * 0',
        KILLED,
    ),
    Mistake(
        "the average is resumed from the raw weights",
        "training/trainer.py",
        "dict(checkpoint.load_tensors(folder, stem))",
        'dict(checkpoint.load_tensors(folder, "model"))',
        KILLED,
    ),
    Mistake(
        "a resumed run starts its data from the beginning",
        "training/loop.py",
        "trainer.dataloader.iterate(state.step)",
        "trainer.dataloader.iterate(0)",
        KILLED,
    ),
    # Times and objectives ----------------------------------------------------------------------------------
    Mistake(
        "the low-noise time weight at t_min > 0",
        "diffusion/schedule.py",
        "weight=(1 - t_min) * 2 * u)",
        "weight=2 * u)",
        TIMES,
    ),
    Mistake(
        "low-noise times without their weight",
        "diffusion/schedule.py",
        "weight=(1 - t_min) * 2 * u)",
        "weight=torch.full_like(u, 1 - t_min))",
        TIMES,
    ),
    Mistake(
        "low-noise times start at 0, whatever t_min",
        "diffusion/schedule.py",
        "t=t_min + (1 - t_min) * u**2",
        "t=u**2",
        TIMES,
    ),
    Mistake(
        "times of an objective start at 0, whatever t_min",
        "diffusion/objective/base.py",
        "return self.time_sampler(u, self.t_min)",
        "return self.time_sampler(u)",
        "unit/test_process.py::test_objectives_draw_times_from_t_min_on",
    ),
    Mistake(
        "sigma in place of its rate",
        "diffusion/objective/score_matching.py",
        "ScoreEntropyTerms(x_t, x_0, sigma, rate, ",
        "ScoreEntropyTerms(x_t, x_0, sigma, sigma, ",
        f"{BOUND}::test_absorbing_bound_is_the_entropy",
    ),
    Mistake(
        "λ-DCE without 1/λ",
        "diffusion/objective/x0_prediction.py",
        "weight = 1 / t.clamp_min(1e-30)",
        "weight = torch.ones_like(t)",
        f"{OBJECTIVES}::test_lambda_dce_is_its_definition",
    ),
    Mistake(
        "any-order divides by one position too many",
        "diffusion/objective/x0_prediction.py",
        "sigma, length / k, ",
        "sigma, length / (k + 1), ",
        f"{OBJECTIVES}::test_any_order_is_its_definition",
    ),
    Mistake(
        "the loss counts positions that noise left alone",
        "diffusion/objective/coefficients.py",
        "loss if self.counts is None else torch.where(self.counts, loss, 0)",
        "loss",
        f"{OBJECTIVES}::test_time_dce_is_its_definition",
    ),
    # Likelihood and evaluation -----------------------------------------------------------------------------
    Mistake(
        "bits_per_char of a run inverted",
        "data/packing.py",
        "nats / math.log(2) / characters",
        "nats / math.log(2) * characters",
        BITS,
    ),
    Mistake(
        "held-out bits divide by the characters of all data",
        "data/packing.py",
        'if self._split == "validation":',
        'if self._split == "none":',
        f"{HELD_OUT_NUMBERS}::test_bits_of_records_with_a_label_count_their_own_characters",
    ),
    Mistake(
        "BPE fitted to held-out text",
        "config.py",
        'if self.tokenizer.startswith("bpe:") else 1.0',
        'if self.tokenizer.startswith("bpe") and False else 1.0',
        f"{HELD_OUT_NUMBERS}::test_held_out_text_does_not_change_the_tokenizer",
    ),
    Mistake(
        "BPE of data prepare fitted to held-out text",
        "cli/data.py",
        "column, packing, text_encoding, fraction)",
        "column, packing, text_encoding)",
        f"{HELD_OUT_NUMBERS}::test_a_prepared_folder_names_text_that_its_tokenizer_saw",
    ),
    Mistake(
        "no warning that a tokenizer saw held-out text",
        "training/datasets.py",
        "if _saw_held_out(folder, config):",
        "if False:",
        f"{HELD_OUT_NUMBERS}::test_a_prepared_folder_names_text_that_its_tokenizer_saw",
    ),
    Mistake(
        "bits_per_char of a result inverted",
        "evaluation/results.py",
        "else round(value / units_per_token, digits)",
        "else round(value * units_per_token, digits)",
        BITS,
    ),
    Mistake(
        "bits_per_char of a result per byte",
        "evaluation/results.py",
        "_per_unit(bits, corpus.characters_per_token),",
        "_per_unit(bits, corpus.bytes_per_token),",
        BITS,
    ),
    Mistake(
        "bits that are nats",
        "evaluation/results.py",
        "bits = found.nats / math.log(2)\n    terms",
        "bits = found.nats\n    terms",
        BITS,
    ),
    Mistake(
        "the perplexity of bits",
        "evaluation/results.py",
        "round(math.exp(found.nats), 3)",
        "round(2**found.nats, 3)",
        BITS,
    ),
    Mistake(
        "the prior term is dropped",
        "likelihood/terms.py",
        "prior=(count * process.prior_kl(ends[1]))",
        "prior=(0 * count * process.prior_kl(ends[1]))",
        TERMS,
    ),
    Mistake(
        "the reconstruction term is dropped",
        "likelihood/terms.py",
        "if ends[0] > 0:",
        "if ends[0] < 0:",
        TERMS,
    ),
    Mistake(
        "the bound without the weights of its times",
        "likelihood/terms.py",
        "diffusion = times.weight.to(diffusion.dtype)[..., None] * diffusion\n",
        "",
        TERMS,
    ),
    Mistake(
        "padding counts in the bound",
        "likelihood/terms.py",
        "diffusion=torch.where(valid, diffusion, 0).sum(-1)",
        "diffusion=diffusion.sum(-1)",
        TERMS,
    ),
    Mistake(
        "published numbers are integrals, not means over t",
        "likelihood/estimators.py",
        "times.weight / (1 - self.t_min)",
        "times.weight",
        f"{ESTIMATE}::test_published_numbers_are_means_over_t_of_the_diffusion_term",
    ),
    Mistake(
        "the weight of times by noise without its constant",
        "likelihood/terms.py",
        "weight=3 * (last - first) * u**2",
        "weight=3 * u**2",
        f"{ESTIMATE}::test_times_carry_their_weight",
    ),
    Mistake(
        "the standard error of independent draws",
        "likelihood/variance_reduction.py",
        "paired_variance(residuals, 1 + uncertainty**2) / self.draws**2",
        "paired_variance(residuals, 1 + uncertainty**2) / self.draws",
        f"{ESTIMATE}::test_the_error_is_the_spread_over_seeds",
    ),
    Mistake(
        "every sequence has the same weight, whatever its length",
        "likelihood/estimate.py",
        "nats=float(nats.sum() / tokens),",
        "nats=float((nats / draws.lengths).mean()),",
        f"{ESTIMATE}::test_texts_of_different_lengths_count_by_their_tokens",
    ),
    Mistake(
        "the validation bound per sequence, not per token",
        "training/validation.py",
        "nats=sum(terms) / tokens",
        "nats=sum(terms) / count",
        "unit/test_padding.py::test_the_validation_bound_is_that_of_single_sequences",
    ),
    Mistake(
        "the error of the validation bound is that of independent times",
        "likelihood/variance_reduction.py",
        "in_order = values[np.argsort(times)]",
        "in_order = values",
        "unit/test_training.py::test_the_error_of_the_validation_bound_is_its_deviation_over_seeds",
    ),
    Mistake(
        "validation without the weights of its times",
        "training/validation.py",
        "inputs = [a[rows] for a in (x_0, x_t, x_first, *times)]",
        "inputs = [a[rows] for a in (x_0, x_t, x_first, times.t, torch.ones_like(times.weight))]",
        "unit/test_padding.py::test_the_validation_bound_is_that_of_single_sequences",
    ),
    Mistake(
        "the order of own samples is inverted",
        "evaluation/own_samples.py",
        "steps.argsort(-1)",
        "steps - 1",
        "exact/test_orders.py::test_own_samples_are_bounded_from_both_sides",
    ),
    Mistake(
        "every validation sequence has the label of the first",
        "training/validation.py",
        "torch.from_numpy(blocks.label_ids(ids))[rows]",
        "torch.from_numpy(blocks.label_ids(ids))[0 * rows]",
        "unit/test_labels.py::test_every_validation_sequence_has_its_own_label",
    ),
    Mistake(
        "the reconstruction term of validation has the noise of t",
        "training/validation.py",
        "for t in (times.t, torch.zeros_like(times.t))",
        "for t in (times.t, times.t)",
        "unit/test_padding.py::test_the_reconstruction_term_has_the_noise_of_the_first_time",
    ),
    Mistake(
        "the importer's default for sigma_min",
        "hub/convert/layout.py",
        '("noise.sigma_min", 1e-4)',
        '("noise.sigma_min", 1e-3)',
        "unit/test_published.py::test_noise_that_a_configuration_leaves_out_is_that_of_the_published_code",
    ),
    Mistake(
        "functions are audited with one schedule only",
        "evaluation/audit/losses.py",
        'SCHEDULES[:2] if "schedule" in self.takes',
        'SCHEDULES[:1] if "schedule" in self.takes',
        "exact/test_audit.py::test_a_function_that_takes_the_schedule_must_have_the_prior_term",
    ),
    Mistake(
        "a counter-example is lost to an error of a later case",
        "evaluation/audit/verdict.py",
        "if failures and not found:",
        "if failures:",
        "unit/test_audit_command.py::test_a_counter_example_is_final_whatever_other_models_do",
    ),
    Mistake(
        "factors of control variates are taken as known",
        "likelihood/variance_reduction.py",
        "paired_variance(residuals, 1 + uncertainty**2)",
        "paired_variance(residuals)",
        f"{ESTIMATE}::test_the_error_counts_the_uncertainty_of_the_factors_of_control_variates",
    ),
    Mistake(
        "no reconstruction term where there is little noise",
        "likelihood/terms.py",
        "if ends[0] > 0:",
        "if ends[0] > 1e-3:",
        "exact/test_likelihood.py::test_the_reconstruction_term_counts_however_little_noise_there_is",
    ),
    Mistake(
        "the validation split is rounded down",
        "data/packing.py",
        "round(total * val_fraction)",
        "int(total * val_fraction)",
        "unit/test_data.py::test_validation_is_the_tail",
    ),
    Mistake(
        "weights are hashed in one file and loaded from another",
        "stored_weights.py",
        'Path(f"/dev/fd/{file.fileno()}")',
        "path",
        f"{BESIDE}::test_a_digest_is_of_the_file_that_is_loaded",
    ),
    Mistake(
        "a checkpoint that is pruned while it is loaded is an error",
        "checkpoint.py",
        "if all(checkpoint.exists() for checkpoint in checkpoints):",
        "if True:",
        f"{BESIDE}::test_a_checkpoint_may_be_pruned_at_any_moment_of_loading",
    ),
    Mistake(
        "a checkpoint that was pruned counts as damaged",
        "checkpoint.py",
        "if not folder.exists():",
        "if False:",
        f"{BESIDE}::test_a_checkpoint_may_be_pruned_at_any_moment_of_loading",
    ),
    # Samplers ----------------------------------------------------------------------------------------------
    Mistake(
        "Euler's rate is that of the next time",
        "sampling/grid.py",
        "((t - s) * model.schedule.rate(t) * model.process.incoming_rate).to(output.dtype)",
        "((t - s) * model.schedule.rate(s) * model.process.incoming_rate).to(output.dtype)",
        f"{DRAWS}::test_fused_draws_are_those_of_the_table",
    ),
    Mistake(
        "a mask is revealed at the rate of the wrong time",
        "diffusion/process/absorbing.py",
        "torch.exp(-sigma_s) * corruption_probability(sigma_t - sigma_s)",
        "torch.exp(-sigma_t) * corruption_probability(sigma_t - sigma_s)",
        "exact/test_algebra.py::test_posterior_is_bayes_rule",
    ),
    Mistake(
        "samplers keep the graph of the network's output",
        "sampling/base.py",
        "    @torch.no_grad()\n",
        "",
        f"{DRAWS}::test_gradients_are_off_within_a_step_and_on_between_two",
    ),
    Mistake(
        "the steps of a grid go nowhere",
        "sampling/base.py",
        "grid[:-1], grid[1:], step",
        "grid[:-1], grid[:-1], step",
        f"{DRAWS}::test_draws_have_the_enumerated_distribution",
    ),
    Mistake(
        "a sampler does not check the model",
        "sampling/base.py",
        "        self.check(model)\n",
        "",
        f"{DRAWS}::test_bad_settings_are_refused",
    ),
    Mistake(
        "temperature multiplies",
        "sampling/warping.py",
        "(log_p / max(self.temperature, COLDEST))",
        "(log_p * max(self.temperature, COLDEST))",
        f"{DRAWS}::test_temperature_acts_on_the_clean_token_alone",
    ),
    Mistake(
        "guidance towards the model without a label",
        "sampling/guidance.py",
        "interpolate_log(unconditional, conditional, guidance)",
        "interpolate_log(conditional, unconditional, guidance)",
        "exact/test_guidance.py::test_a_mask_is_revealed_at_its_pace_to_a_normalised_mixture",
    ),
    Mistake(
        "guidance counts one network",
        "sampling/guidance.py",
        "return networks_per_call(self.model) + networks_per_call(self.unconditional)",
        "return networks_per_call(self.model)",
        "exact/test_guidance.py::test_two_calls_are_counted_as_two",
    ),
    Mistake(
        "a temperature changes the rate at which masks are revealed",
        "sampling/warping.py",
        "        log_score = log_score_at(self.model, hidden, x_t, sigma)\n",
        "        log_score = log_score_at(self.model, hidden, x_t, 0.9 * sigma)\n",
        f"{DRAWS}::test_temperature_acts_on_the_clean_token_alone",
    ),
    Mistake(
        "the rows of a second batch repeat the first",
        "generate/run.py",
        "indices = first + torch.arange(",
        "indices = torch.arange(",
        "unit/test_generate.py::test_a_sample_does_not_depend_on_its_batch",
    ),
    Mistake(
        "tokens of a later shard are read from its start",
        "data/packing.py",
        "offsets = starts[chosen] - (int(self._ends[number]) - len(tokens))",
        "offsets = starts[chosen] % len(tokens)",
        "unit/test_data.py::test_windows_of_packed_data_join_to_the_text",
    ),
    Mistake(
        "padding that is ignored counts as valid",
        "data/packing.py",
        'valid = inside if self.index.pad == "ignore" else np.ones(rows.shape, bool)',
        "valid = np.ones(rows.shape, bool)",
        "unit/test_data.py::test_records_are_padded",
    ),
    Mistake(
        "moments of the optimizer are not saved",
        "training/trainer.py",
        "for key, value in optimizer.state.get(weight, {}).items()",
        "for key, value in optimizer.state.get(name, {}).items()",
        KILLED,
    ),
    Mistake(
        "sampling by confidence reveals padding first",
        "sampling/confidence.py",
        "uncertainty + LATER * (p.argmax(-1) == self.pad)",
        "uncertainty",
        f"{DRAWS}::test_padding_is_revealed_last",
    ),
    Mistake(
        "the padding of a model does not reach the sampler",
        "generate/run.py",
        "with_padding(loaded, settings))",
        "settings)",
        "unit/test_generate.py::test_the_padding_of_a_model_reaches_samplers_by_confidence",
    ),
    Mistake(
        "Muon takes queries, keys and values for one matrix",
        "training/optimizer.py",
        '{"params": stacked, "parts": 3}',
        '{"params": stacked, "parts": 1}',
        "unit/test_muon.py::test_queries_keys_and_values_are_matrices_of_their_own",
    ),
    Mistake(
        "the scale of divided updates is that of the whole matrix",
        "training/muon.py",
        'math.sqrt(max(rows // group["parts"], columns))',
        "math.sqrt(max(rows, columns))",
        "unit/test_muon.py::test_updates_have_the_root_mean_square_of_adamw",
    ),
    Mistake(
        "averages of rows change in a step that is not finite",
        "training/muon.py",
        "torch.where(found_inf.bool(), before, before.lerp(squares.to(before.dtype), 1 - beta2))",
        "before.lerp(squares.to(before.dtype), 1 - beta2)",
        "unit/test_muon.py::test_a_step_that_is_not_finite_changes_nothing",
    ),
    Mistake(
        "joined tables of n-grams count from the far end",
        "nn/embeddings.py",
        "table.view(len(total), -1, table.shape[-1]) + total[:, None]",
        "table.view(-1, len(total), table.shape[-1]) + total",
        "unit/test_transformer.py::test_joined_tables_are_the_same_embedding",
    ),
    # Texts without an ending --------------------------------------------------------------------------------
    Mistake(
        "padding is given after a gap that ends a template",
        "generate/template.py",
        "is_open = [pad is not None and row[-1:] == [-1] for row in rows]",
        "is_open = [False for row in rows]",
        "exact/test_completions.py::test_what_is_shown_is_the_beginning_of_the_models_continuation",
    ),
    Mistake(
        "masks after the limit stay for models of other noise levels",
        "generate/template.py",
        "sums = isinstance(process, Absorbing) and not model.depends_on_sigma",
        "sums = isinstance(process, Absorbing)",
        "exact/test_completions.py::test_positions_after_the_limit_cost_a_time_free_denoiser_nothing",
    ),
    Mistake(
        "padding is counted as completion",
        "serve/fill.py",
        "and id != self.loaded.learned_pad",
        "and id is not None",
        "exact/test_completions.py::test_the_end_of_a_completion_is_the_models_or_the_limit",
    ),
    Mistake(
        "a stream sends the beginning of a stop string",
        "serve/fill.py",
        "after, may_go_on=True",
        "after",
        "integration/test_serve.py::test_openai_stop_ends_the_text_before_it",
    ),
    Mistake(
        "bytes that are not UTF-8 are those that follow them in the vocabulary",
        "tokenizer/bpe.py",
        "[-1 if id is None else id for id in found]",
        "[-1 if id is None else id + 1 for id in found]",
        "unit/test_text_files.py::test_bpe_encodes_any_bytes",
    ),
    Mistake(
        "a carriage return at the end of a piece is no part of a line end",
        "data/text_file.py",
        'end = "\\r" if text.endswith("\\r") else ""',
        'end = ""',
        "unit/test_text_files.py::test_line_ends_crlf_are_read_as_lf",
    ),
    Mistake(
        "integers are decoded without the least one",
        "tokenizer/basic.py",
        "(ids + self.low).tolist()",
        "ids.tolist()",
        "unit/test_tokenizer.py::test_negative_integers_come_back",
    ),
    Mistake(
        "labels of records that are left out stay",
        "data/shards.py",
        "[chunk.labels[number] for number in kept]",
        "chunk.labels[: len(kept)]",
        "unit/test_data.py::test_long_records_are_left_out_with_their_labels",
    ),
    # Files -------------------------------------------------------------------------------------------------
    Mistake(
        "a writer removes the temporary file of the next one",
        "files.py",
        "    finally:  # once it is renamed, a file of its name is another writer's\n",
        "    finally:\n        temporary.unlink(missing_ok=True)\n",
        "unit/test_files.py::test_the_end_of_one_write_leaves_the_next_writer_alone",
    ),
    Mistake(
        "a writer removes the lock of the next one",
        "files.py",
        "if _is_at(handle, lock):",
        "if lock.exists():",
        "unit/test_files.py::test_the_end_of_one_folder_leaves_the_next_writer_alone",
    ),
    Mistake(
        "a run is resumed with another seed",
        "training/trainer.py",
        "if stored.config.seed != self.config.seed:",
        "if False:",
        "integration/test_run_folder.py::test_what_cannot_be_resumed",
    ),
    Mistake(
        "a run whose checkpoints are lost starts over",
        "training/overrides.py",
        'if record.get("save_seconds", 0) > 0:',
        "if False:",
        "integration/test_run_folder.py::test_a_run_whose_checkpoints_are_lost",
    ),
    Mistake(
        "steps of Unicode never count as growth",
        "tokenizer/growth.py",
        "UNICODE.get(str(kind), 1) if is_foreign else 1.0",
        "1.0",
        "unit/test_memory_budgets.py::test_a_tokenizer_that_multiplies_texts_is_rejected",
    ),
    Mistake(
        "a row group is read a thousand rows at a time whatever it holds",
        "data/budgets.py",
        "max(1, min(1024, 2 * LONGEST_WHOLE // max(1, size)))",
        "1024",
        "unit/test_memory_budgets.py::test_a_repeated_text_of_parquet_is_read_a_few_rows_at_a_time",
    ),
    # Networks of the user's own ----------------------------------------------------------------------------
    Mistake(
        "padding that a network does not take",
        "nn/adapter.py",
        'if valid is None or self.takes("valid") or valid.all():',
        "if True:",
        "unit/test_adapter.py::test_without_the_argument_rows_are_computed_without_their_padding",
    ),
    Mistake(
        "a network is given its second argument although that has a default",
        "nn/adapter.py",
        "rest[:1] if self._is_required[name] and name not in",
        "rest[:1] if name not in",
        "unit/test_adapter.py::test_the_signature_decides_what_is_passed",
    ),
    Mistake(
        "the network of a time-free model is given the noise level",
        "diffusion/parameterization.py",
        'sigma if self.time_conditioning == "sigma" else',
        'sigma if self.time_conditioning != "zero" else',
        "unit/test_adapter.py::test_a_model_of_a_network_without_sigma_is_time_free",
    ),
    Mistake(
        "a run whose options were changed counts as trained here",
        "networks.py",
        ' and record["network"] == dict(network):',
        ":",
        "unit/test_networks.py::test_a_run_of_ones_own_is_found_again",
    ),
    Mistake(
        "the network of a copied configuration is imported",
        "training/overrides.py",
        'if file and in_file.get("class") and file.name == checkpoint.CONFIG:',
        "if False:",
        "unit/test_networks.py::test_a_downloaded_folder_imports_nothing",
    ),
    Mistake(
        "code in the working directory replaces installed modules",
        "networks.py",
        "sys.path.append(folder)",
        "sys.path.insert(0, folder)",
        "unit/test_networks.py::test_a_named_class_is_found_in_the_working_directory_and_built",
    ),
    Mistake(
        "initial weights of a user's network do not follow the seed",
        "factory.py",
        "            torch.manual_seed(config.seed)\n",
        "",
        "unit/test_networks.py::test_the_weights_are_the_classs_own_and_seeded",
    ),
    Mistake(
        "labels are accepted by a network that does not take them",
        "nn/adapter.py",
        '        if label is not None:\n            self.require("label")\n',
        "",
        "unit/test_adapter.py::test_padding_in_training_and_labels_are_rejected",
    ),
]
