{{/* Names and labels. */}}
{{- define "torchere.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "torchere.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "torchere.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "torchere.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "torchere.selector" -}}
app.kubernetes.io/name: {{ include "torchere.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* Of the pod of `helm test`, which no Service may take for a server and the NetworkPolicy lets in. */}}
{{- define "torchere.testLabels" -}}
app.kubernetes.io/component: test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "torchere.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "torchere.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "torchere.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "torchere.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "torchere.image" -}}
{{- $old := .Values.torchserve_image | default "" -}}
{{- if $old -}}
{{- $old -}}
{{- else if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* A number of the values as the configuration file wants it: YAML makes floats of them, and 2e+07 is not whole. */}}
{{- define "torchere.plain" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ . | int64 }}{{- else -}}{{ . | toString }}{{- end -}}
{{- end -}}

{{/* Where the archives are, inside the container. */}}
{{- define "torchere.store" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- if eq $v.configFrom "volume" -}}{{ printf "%s/model-store" (trimSuffix "/" $v.mount) }}
{{- else if eq $v.storeType "bundled" -}}/home/model-server/model-store
{{- else -}}/mnt/model-store
{{- end -}}
{{- end -}}

{{/*
What counts after the values of TorchServe's chart were taken over, as YAML: ports, replicas, storeType, claimName,
configFrom, mount, gpus, limits, requests. A value of theirs wins over a default of ours, for whoever sets it means it.
Its older values name no claim: it was always model-store-claim.
*/}}
{{- define "torchere.effective" -}}
{{- $ts := .Values.torchserve | default dict -}}
{{- $volume := .Values.persistentVolume | default .Values.persitant_volume | default (dict "name" "") -}}
{{- $claim := dig "name" "model-store-claim" $volume -}}
{{- $ports := dict
      "http" (default .Values.ports.http $ts.inference_port)
      "management" (default .Values.ports.management $ts.management_port)
      "metrics" (default .Values.ports.metrics $ts.metrics_port)
      "grpc" (default .Values.ports.grpc $ts.grpc_inference_port)
      "grpcManagement" .Values.ports.grpcManagement -}}
{{- $limits := dict -}}
{{- if $ts.n_cpu -}}{{- $_ := set $limits "cpu" ($ts.n_cpu | toString) -}}{{- end -}}
{{- if $ts.memory_limit -}}{{- $_ := set $limits "memory" $ts.memory_limit -}}{{- end -}}
{{- $requests := deepCopy $limits -}}
{{- if $ts.memory_request -}}{{- $_ := set $requests "memory" $ts.memory_request -}}{{- end -}}
{{- toYaml (dict
      "ports" $ports
      "replicas" (dig "replicas" .Values.replicaCount (.Values.deployment | default dict))
      "storeType" (ternary "pvc" .Values.modelStore.type (ne $claim ""))
      "claimName" (default .Values.modelStore.pvc.claimName $claim)
      "configFrom" (ternary "volume" .Values.server.configFrom (ne $claim ""))
      "mount" (default "/home/model-server/shared/" $ts.pvd_mount)
      "gpus" (default .Values.gpu.count $ts.n_gpu)
      "limits" $limits
      "requests" $requests) -}}
{{- end -}}

{{/* Seconds between SIGTERM and SIGKILL: everything the server may take, and some. */}}
{{- define "torchere.grace" -}}
{{- add (ceil .Values.server.drainDelaySeconds) (ceil .Values.server.drainTimeoutSeconds) 15 -}}
{{- end -}}

{{/* The ports of the Service that clients call. `int`, for helm 3.18 takes a 0 that was read from a file for a value. */}}
{{- define "torchere.httpPort" -}}
{{- default (include "torchere.effective" . | fromYaml).ports.http (int .Values.service.httpPort) -}}
{{- end -}}

{{- define "torchere.grpcPort" -}}
{{- default (include "torchere.effective" . | fromYaml).ports.grpc (int .Values.service.grpcPort) -}}
{{- end -}}
