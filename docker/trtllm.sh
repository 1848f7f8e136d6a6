#!/bin/bash
# Inside of a container of TensorRT-LLM's backend: builds an engine for the checkpoint in /model, once, writes the model repository
# of the C++ ensemble and serves it. docker/compose.yaml runs it with images of two releases, whose files lie in different places:
#
#   APP             templates (all_models), tools and scripts: /app, or a checkout of tensorrtllm_backend
#   CONVERT         convert_checkpoint.py for Llama
#   ENGINES         where engines are kept
#   MAX_BATCH_SIZE  of the engine and of every model of the ensemble
#   MAX_INPUT_LEN, MAX_SEQ_LEN, MAX_NUM_TOKENS, TENSOR_PARALLEL_SIZE, HTTP_PORT
#   PREFILLED       a model repository whose templates are filled already, which is taken and patched instead
set -euo pipefail
: "${APP:?}" "${CONVERT:?}" "${ENGINES:=/engines}" "${CHECKPOINT:=/model}" "${REPOSITORY:=/tmp/repository}"
: "${MAX_BATCH_SIZE:=256}" "${MAX_INPUT_LEN:=4096}" "${MAX_SEQ_LEN:=8192}" "${MAX_NUM_TOKENS:=4096}"
: "${TENSOR_PARALLEL_SIZE:=1}" "${HTTP_PORT:=8123}"

shape=$(sha256sum "$CHECKPOINT/config.json" | cut -c1-12)
engine=$ENGINES/$shape-tp$TENSOR_PARALLEL_SIZE-b$MAX_BATCH_SIZE-i$MAX_INPUT_LEN-s$MAX_SEQ_LEN-t$MAX_NUM_TOKENS
if [ ! -e "$engine/complete" ]; then
  rm -rf "$engine" /tmp/converted
  python3 "$CONVERT" --model_dir "$CHECKPOINT" --output_dir /tmp/converted --dtype bfloat16 --tp_size "$TENSOR_PARALLEL_SIZE"
  trtllm-build --checkpoint_dir /tmp/converted --output_dir "$engine" \
    --gemm_plugin auto --gpt_attention_plugin bfloat16 --remove_input_padding enable --kv_cache_type paged \
    --use_paged_context_fmha enable --multiple_profiles enable \
    --max_batch_size "$MAX_BATCH_SIZE" --max_input_len "$MAX_INPUT_LEN" --max_seq_len "$MAX_SEQ_LEN" --max_num_tokens "$MAX_NUM_TOKENS"
  touch "$engine/complete"
fi

rm -rf "$REPOSITORY"
if [ -n "${PREFILLED:-}" ]; then
  # As the published write-ups do it with repositories that were filled for a batch of 2048.
  cp -r "$PREFILLED" "$REPOSITORY"
  find "$REPOSITORY" -name config.pbtxt -exec sed -i -E \
    -e "s/batch_size: [0-9]+/batch_size: $MAX_BATCH_SIZE/" \
    -e "s/preferred_batch_size: \[ *[0-9]+ *\]/preferred_batch_size: [ $MAX_BATCH_SIZE ]/" \
    -e "/key: \"tokenizer_dir\"/,/}/ s#string_value: \"[^\"]*\"#string_value: \"$CHECKPOINT\"#" \
    -e "/key: \"gpt_model_path\"/,/}/ s#string_value: \"[^\"]*\"#string_value: \"$engine\"#" {} +
else
  mkdir -p "$REPOSITORY"
  cp -r "$APP"/all_models/inflight_batcher_llm/{ensemble,preprocessing,tensorrt_llm,postprocessing} "$REPOSITORY"
  # What stays "${...}" its models take for their own default.
  fill() {
    python3 "$APP/tools/fill_template.py" -i "$REPOSITORY/$1/config.pbtxt" \
      "triton_max_batch_size:$MAX_BATCH_SIZE,logits_datatype:TYPE_FP32${2:+,$2}"
  }
  fill ensemble
  fill preprocessing "tokenizer_dir:$CHECKPOINT,preprocessing_instance_count:16,add_special_tokens:true,max_queue_delay_microseconds:0"
  fill postprocessing "tokenizer_dir:$CHECKPOINT,postprocessing_instance_count:16,skip_special_tokens:true,max_queue_delay_microseconds:0"
  fill tensorrt_llm "triton_backend:tensorrtllm,engine_dir:$engine,decoupled_mode:true,batching_strategy:inflight_fused_batching,\
batch_scheduler_policy:max_utilization,enable_chunked_context:true,kv_cache_free_gpu_mem_fraction:0.9,enable_kv_cache_reuse:false,\
exclude_input_in_output:true,max_queue_delay_microseconds:0,max_queue_size:0,max_beam_width:1,encoder_input_features_data_type:TYPE_FP16"
fi

ports=(--http-port "$HTTP_PORT" --grpc-port $((HTTP_PORT + 1)) --metrics-port $((HTTP_PORT + 2)))
if [ "$TENSOR_PARALLEL_SIZE" = 1 ]; then
  exec tritonserver --model-repository="$REPOSITORY" "${ports[@]}"
fi
# It starts one server a rank through MPI and returns.
python3 "$APP/scripts/launch_triton_server.py" --world_size "$TENSOR_PARALLEL_SIZE" --model_repo "$REPOSITORY" \
  --http_port "$HTTP_PORT" --grpc_port $((HTTP_PORT + 1)) --metrics_port $((HTTP_PORT + 2))
while pidof -q tritonserver mpirun; do sleep 1; done
