# SPDX-License-Identifier: Apache-2.0
"""The llm model: token ids in, token ids out. A thin adapter between Triton and the engine process."""

import json
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import msgspec

from flashinfer_backend.config_tools.knobs import LLM, TRT_LLM
from flashinfer_backend.core.bounds import NAME, check
from flashinfer_backend.core.config import EngineConfig
from flashinfer_backend.core.headers import is_json
from flashinfer_backend.core.paths import owner_pid, processes_dir, resolve_model_dir, run_dir, server_pid
from flashinfer_backend.serving.adapters import AdapterNames
from flashinfer_backend.serving.engines import Engines
from flashinfer_backend.text.delta import DeltaDecoder
from flashinfer_backend.text.tokenizer import TextTokenizer
from flashinfer_backend.transport.api_states import read_api_states
from flashinfer_backend.transport.delivery_marks import DeliveryMarks
from flashinfer_backend.transport.endpoint import LEADS, EngineDown
from flashinfer_backend.transport.keeper_handle import KeeperHandle
from flashinfer_backend.triton_server.adapters import TaskThread
from flashinfer_backend.triton_server.bounds import check_json_logits
from flashinfer_backend.triton_server.client_watch import ClientWatch, postprocessing_probe
from flashinfer_backend.triton_server.freeze_guard import FreezeGuard
from flashinfer_backend.triton_server.metrics import Metrics
from flashinfer_backend.triton_server.outputs import refuse_unmapped
from flashinfer_backend.triton_server.parameters import knob_value, read_parameters
from flashinfer_backend.triton_server.request_parameters import read_request_parameters
from flashinfer_backend.triton_server.requests import LlmLimits, Tensors, is_stop, parse_request
from flashinfer_backend.triton_server.responder import Responder
from flashinfer_backend.triton_server.sequence import ResponseIndices, Sequence, of_ensemble
from flashinfer_backend.triton_server.texts import bound_texts


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        """Starts the engines or attaches to them. Raises what is wrong with the settings or an engine."""
        import triton_python_backend_utils as pb_utils  # exists inside Triton's stub only

        self._pb = pb_utils
        bound_texts(pb_utils)
        self._name = args["model_name"]
        self._parameters = read_parameters(args["model_config"], LLM)
        # An engine takes a minute to start: what is wrong with any parameter is said before.
        config = EngineConfig.from_parameters(self._parameters)
        knob = partial(knob_value, self._parameters)
        log_probs, exclude_input = knob("streamed_log_probs"), knob("exclude_input_in_output")
        fold_input_ids, period_ms = knob("fold_input_ids"), knob("cancellation_check_period_ms")
        self._skip_special_tokens = knob("skip_special_tokens")
        self._tokenizer_folder = resolve_model_dir(config.tokenizer_dir or config.model_dir)
        model_config = json.loads(args["model_config"])
        server, owner = server_pid(), owner_pid()
        # Without serve the server does not forward the headers that say which answers are JSON.
        by_serve = owner != server
        json_logits_mib = knob("max_json_logits_mib") if by_serve else 0
        folder = run_dir(owner, self._name)
        self._adapters = AdapterNames(config, folder) if config.max_loras else None
        self._storing = TaskThread(config.lora_cache_host_memory_bytes) if config.max_loras else None
        self._submitting = threading.Lock()  # the order of sequences, and which engines they go to
        self._responder = Responder(pb_utils)
        self._engines = self._responder.engines = Engines(
            folder, config.replicas, KeeperHandle(folder, owner, config, stays=by_serve),
            config.enable_kv_cache_reuse, config.stats_check_period_ms / 1000, on_stop=self._responder.stop,
        )  # fmt: skip
        self._responder.marks = marks = DeliveryMarks(folder, os.getpid())
        self._freeze_guard = FreezeGuard(processes_dir(owner))
        self._responder.metrics = Metrics(
            pb_utils, self._name, args["model_version"], folder, lambda: self._engines.statuses,
            config.stats_check_period_ms / 1000, lambda: read_api_states(processes_dir(owner)),
        )  # fmt: skip
        name = self._parameters.get("postprocessing_model_name", "postprocessing")
        probe = self._responder.probe = postprocessing_probe(pb_utils, name)
        self._watch = ClientWatch(
            self._responder.open_requests, self._engines.cancel, marks, probe, period_ms / 1000
        )
        try:
            status = self._engines.wait_ready()
        except Exception:
            self.finalize()
            raise
        self._limits = LlmLimits(
            vocab_size=status.vocab_size,
            max_input_len=status.max_input_len,
            decoupled=model_config.get("model_transaction_policy", {}).get("decoupled", False),
            default_exclude_input=exclude_input,
            guided_decoding=config.guided_decoding_backend != "none",
            fold_input_ids=fold_input_ids,
            log_probs_so_far=log_probs == "all" or (log_probs == "auto" and self._name == TRT_LLM),
            max_seq_len=status.max_seq_len,
            longest_seq_len=status.longest_seq_len,
            max_json_logits_mib=json_logits_mib,
        )

    def is_ready(self) -> bool:
        """Asked by newer servers for the model's readiness."""
        return self._engines.up

    def execute(self, requests: list[Any]) -> None:
        """Hands the requests to the engine; sender threads answer them."""
        with self._freeze_guard.watched():
            for request in requests:
                self._execute(request)

    def finalize(self) -> None:
        """Leaves the engines, which end with the last instance."""
        if self._storing is not None:
            self._storing.close()
        self._freeze_guard.close()
        self._watch.close()
        self._responder.marks.close()
        self._engines.close()
        self._responder.close()
        self._responder.metrics.close()

    def _execute(self, request: Any) -> None:
        sender = request.get_response_sender()
        with self._errors_to(sender):
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            accept = partial(self._accept_later, request, tensors, sender)
            if self._storing is None or not self._storing.takes(tensors, is_stop(tensors), accept):
                self._accept(request, tensors, sender)

    def _accept_later(self, request: Any, tensors: Tensors, sender: Any) -> None:
        with self._errors_to(sender):
            self._accept(request, tensors, sender)

    @contextmanager
    def _errors_to(self, sender: Any) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError as error:  # by the stub; HTTP generate checks no bytes
            message = f"the request's id or a parameter is not UTF-8: {error.reason} at byte {error.start}"
            self._responder.refuse(sender, message, self._pb.TritonError.INTERNAL)
        except ValueError as error:
            # TensorRT-LLM's backend answers every mistake with INTERNAL; so does this one, everywhere.
            self._responder.refuse(sender, str(error), self._pb.TritonError.INTERNAL)
        except Exception as error:  # the other requests of this call must not fail with it
            traceback.print_exc()
            self._responder.refuse(sender, f"internal error: {error}", self._pb.TritonError.INTERNAL)

    def _accept(self, request: Any, tensors: Tensors, sender: Any) -> None:
        request_id = request.request_id()
        check("the request's id", len(request_id), NAME.size, "characters")  # each chunk has it
        if is_stop(tensors):
            self._stop(request_id, sender)
            return
        parameters = request.parameters()
        asked = read_request_parameters(parameters, request.timeout())
        rows = parse_request(tensors, self._limits, asked, self._adapters)
        wanted = set(request.requested_output_names())
        refuse_unmapped(rows, wanted)
        limits = self._limits
        if limits.max_json_logits_mib and of_ensemble(wanted) and is_json(parameters):
            check_json_logits(rows, limits.vocab_size, limits.max_seq_len, limits.max_json_logits_mib)
        # Before thousands of sequences are made that no engine would take.
        if refusal := self._engines.refusal(sum(row.num_return_sequences for row in rows)):
            self._responder.refuse(sender, refusal, self._pb.TritonError.UNAVAILABLE)
            return
        logits = any(row.params.asks_for_logits for row in rows)
        opened, schedule = self._responder.open(sender, request_id, wanted, logits)
        for index, row in enumerate(rows):
            for number in range(row.num_return_sequences):
                indices = ResponseIndices(
                    batch_index=index if len(rows) > 1 else None,
                    sequence_index=number if row.num_return_sequences > 1 else None,
                )
                opened.sequences.append(Sequence(opened, row, indices, schedule))
        opened.remaining = len(opened.sequences)
        try:
            with self._submitting:
                self._submit(opened.sequences)
        except EngineDown as error:
            self._responder.drop(opened, str(error), self._pb.TritonError.UNAVAILABLE)
        except Exception as error:  # what is open is looked after until it is dropped
            traceback.print_exc()
            self._responder.drop(opened, f"internal error: {error}", self._pb.TritonError.INTERNAL)

    def _submit(self, sequences: list[Sequence]) -> None:
        first: Sequence | None = None
        for sequence in sequences:
            row, number = sequence.row, sequence.indices.sequence_index or 0
            params = row.params
            if sequence.follows_text:
                params = sequence.match_stop_words(self._decoder, first if number else None)
            shared = 0
            if number and first is not None:
                # Sequences of one prompt differ by their seed alone.
                params = msgspec.structs.replace(params, seed=(params.seed + number) % 2**64)
                shared = first.handle
            elif row.num_return_sequences > 1:
                first, shared = sequence, LEADS
            submit = partial(
                self._engines.submit,
                *(sequence, row.prompt.tobytes(), params, shared, row.priority, row.timeout_us),
            )
            if not sequence.request.submit(sequence, submit):
                return

    def _stop(self, request_id: str, sender: Any) -> None:
        if not request_id:
            raise ValueError(
                "Trying to stop a request but request ID is not provided; send the id of the request to stop"
            )
        self._engines.tell_stop(request_id)
        # A response, not its flag alone: of that the server tells no client that has not asked for it.
        response = self._pb.InferenceResponse(output_tensors=[])
        sender.send(response, flags=self._pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    @cached_property
    def _decoder(self) -> DeltaDecoder:
        """As postprocessing's: the characters that are counted here are those that it writes."""
        return DeltaDecoder(TextTokenizer(self._tokenizer_folder).backend, self._skip_special_tokens)
