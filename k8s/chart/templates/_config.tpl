{{/* The lines of config.properties. Keys that follow from other values can't be set twice. */}}
{{- define "torchere.properties" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- $p := $v.ports -}}
{{- $scheme := ternary "https" "http" .Values.tls.enabled -}}
{{- $address := .Values.server.address -}}
{{- $inside := ternary $address "127.0.0.1" .Values.management.enabled -}}
{{- $models := list -}}
{{- $settings := dict -}}
{{- $names := dict "workers" (list "minWorkers" "maxWorkers") "batchSize" (list "batchSize") "maxBatchDelayMs" (list "maxBatchDelay") "responseTimeoutSeconds" (list "responseTimeout") -}}
{{- range $model := .Values.models -}}
{{- $models = append $models (ternary (printf "%s=%s" ($model.name | default "") $model.archive) $model.archive (not (empty $model.name))) -}}
{{- $own := dict -}}
{{- range $key, $properties := $names -}}
{{- range $properties -}}
{{- if hasKey $model $key -}}{{- $_ := set $own . (get $model $key | int) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- if $own -}}
{{- $versions := dict $model.version $own -}}
{{- $_ := set $settings $model.name (merge $versions (get $settings $model.name | default dict)) -}}
{{- end -}}
{{- end -}}
{{- $own := dict
      "inference_address" (printf "%s://%s:%v" $scheme $address $p.http)
      "management_address" (printf "%s://%s:%v" $scheme $inside $p.management)
      "metrics_address" (printf "http://%s:%v" $address $p.metrics)
      "grpc_inference_address" $address
      "grpc_inference_port" $p.grpc
      "grpc_management_address" $inside
      "grpc_management_port" $p.grpcManagement
      "model_store" (include "torchere.store" .)
      "load_models" (default "all" (join "," $models))
      "default_workers_per_model" .Values.server.workersPerModel
      "job_queue_size" .Values.server.queueSize
      "default_response_timeout" .Values.server.responseTimeoutSeconds
      "drain_delay_s" .Values.server.drainDelaySeconds
      "drain_timeout_s" .Values.server.drainTimeoutSeconds
      "ts_open_inference_protocol" .Values.server.openInferenceProtocol
      "enable_model_api" .Values.management.modelApi
      "insecure_management" .Values.management.insecure
      "disable_token_authorization" (not .Values.auth.enabled) -}}
{{- if $settings -}}
{{- $_ := set $own "models" (toJson $settings) -}}
{{- end -}}
{{- if and .Values.auth.enabled .Values.auth.secretName -}}
{{- $_ := set $own "token_keys_file" "/run/torchere-keys/keys.json" -}}
{{- else if .Values.auth.enabled -}}
{{- $_ := set $own "key_file" "/run/torchere/key_file.json" -}}
{{- $_ := set $own "token_expiration_min" .Values.auth.expirationMinutes -}}
{{- end -}}
{{- if .Values.leaderWorkerSet.enabled -}}
{{- $_ := set $own "rendezvous_address" (trimAll "[]" $address) -}}
{{- $_ := set $own "rendezvous_port" .Values.leaderWorkerSet.port -}}
{{- $_ := set $own "rendezvous_secret_file" "/run/torchere-rendezvous/secret" -}}
{{- end -}}
{{- if .Values.tls.enabled -}}
{{- $_ := set $own "certificate_file" "/run/torchere-tls/tls.crt" -}}
{{- $_ := set $own "private_key_file" "/run/torchere-tls/tls.key" -}}
{{- $_ := set $own "enable_grpc_ssl" true -}}
{{- end -}}
{{- range $key, $_ := .Values.server.properties -}}
{{- if hasKey $own $key -}}
{{- fail (printf "server.properties.%s: the chart makes this key of its other values; set those (see values.yaml)" $key) -}}
{{- end -}}
{{- end -}}
{{- /* Not `merge`, which takes a 0, a false or an empty text for a key that is missing. */ -}}
{{- $all := dict "grpc_inference_max_connection_age_ms" 300000 "grpc_inference_max_connection_age_grace_ms" 60000 -}}
{{- range list .Values.server.properties $own -}}
{{- range $key, $value := . -}}{{- $_ := set $all $key $value -}}{{- end -}}
{{- end -}}
{{- range $key, $value := $all }}
{{ $key }}={{ include "torchere.escaped" $value }}
{{- end }}
{{- end -}}
