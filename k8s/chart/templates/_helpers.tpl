{{/* Names and labels. */}}
{{- define "torchere.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/*
The release's name alone where it has ours in it. Not for an alias, which one chart may have several of: the release
llama-bert has the names of both its aliases, llama and bert. An alias is the chart's name to Helm.
*/}}
{{- define "torchere.fullname" -}}
{{- $name := include "torchere.name" . -}}
{{- $alone := ternary (contains $name .Release.Name) (eq $name .Release.Name) (or .Chart.IsRoot (eq .Chart.Name "torchere")) -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if $alone -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "torchere.selector" -}}
app.kubernetes.io/name: {{ include "torchere.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Of the pods that run ranks and no server, which no Service may take for one. */}}
{{- define "torchere.ranksSelector" -}}
app.kubernetes.io/name: {{ printf "%s-ranks" (include "torchere.name" . | trunc 57 | trimSuffix "-") | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{/* Of the pod of `helm test`, which no Service may take for a server and the NetworkPolicy lets in. */}}
{{- define "torchere.testLabels" -}}
app.kubernetes.io/component: test
app.kubernetes.io/instance: {{ .Release.Name | quote }}
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
{{- $image := printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- if .Values.image.digest -}}
{{- $image = printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- end -}}
{{- include "torchere.mirrored" (dict "image" (default $image $old) "root" .) -}}
{{- end -}}

{{/* An image in the registry of global.imageRegistry. A first part with a dot or a port, or localhost, is a registry. */}}
{{- define "torchere.mirrored" -}}
{{- $registry := dig "imageRegistry" "" (.root.Values.global | default dict) -}}
{{- if $registry -}}
{{- printf "%s/%s" (trimSuffix "/" $registry) (regexReplaceAll "^(localhost|[^/]*[.:][^/]*)/" .image "") -}}
{{- else -}}
{{- .image -}}
{{- end -}}
{{- end -}}

{{/*
Replicas for the Deployment: with an autoscaler those that run, since Kubernetes would start again from 1 when the number
disappears from the manifest. Nothing where there is no cluster to ask (helm template, a first installation).
*/}}
{{- define "torchere.replicas" -}}
{{- if or .Values.autoscaling.enabled .Values.keda.enabled -}}
{{- $running := lookup "apps/v1" "Deployment" .Release.Namespace (include "torchere.fullname" .) -}}
{{- if $running }}{{ dig "spec" "replicas" 1 $running | int }}{{ end -}}
{{- else -}}
{{- (include "torchere.effective" . | fromYaml).replicas -}}
{{- end -}}
{{- end -}}

{{/*
Another release or alias of this chart in the namespace that has the object for all of them already; or nothing. Of several
that have it, the first by name keeps it. Ask only where the object is enabled: Helm gives up where the cluster does not know the
kind, or refuses the list. `part-of` tells the object from other charts': `helm.sh/chart` begins with the alias. Objects of older
releases lack `part-of`.
*/}}
{{- define "torchere.owner" -}}
{{- $owners := list -}}
{{- range (lookup .apiVersion .kind .root.Release.Namespace "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $ours := or (eq (get $labels "app.kubernetes.io/part-of") "torchere") (hasPrefix "torchere-" (get $labels "helm.sh/chart")) -}}
{{- if and $ours (eq (get $labels "app.kubernetes.io/component") $.component) -}}
{{- $owners = append $owners (include "torchere.owned" $labels) -}}
{{- end -}}
{{- end -}}
{{- $own := include "torchere.owned" (include "torchere.selector" .root | fromYaml) -}}
{{- with first (sortAlpha $owners) }}{{ if ne . $own }}{{ . }}{{ end }}{{ end -}}
{{- end -}}

{{- define "torchere.owned" -}}
{{ get . "app.kubernetes.io/name" }} of the release {{ get . "app.kubernetes.io/instance" }}
{{- end -}}

{{/* A number of the values as the configuration file wants it: YAML makes floats of them, and 2e+07 is not whole. */}}
{{- define "torchere.plain" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) -}}{{ . | int64 }}{{- else -}}{{ . | toString }}{{- end -}}
{{- end -}}

{{/*
A value of config.properties, escaped so that the reader of Java's properties returns it as it was written. The last blank is
escaped for Helm, which trims manifests.
*/}}
{{- define "torchere.escaped" -}}
{{- $text := include "torchere.plain" . | replace "\\" "\\\\" | replace "\t" "\\t" | replace "\n" "\\n" | replace "\r" "\\r" -}}
{{- $text = regexReplaceAll " $" $text "\\u0020" -}}
{{- if hasPrefix " " $text -}}{{ print "\\" $text }}{{- else -}}{{ $text }}{{- end -}}
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
{{- default (add (ceil .Values.server.drainDelaySeconds) (ceil .Values.server.drainTimeoutSeconds) 15) (int .Values.terminationGracePeriodSeconds) -}}
{{- end -}}

{{/* The ports of the Service that clients call. `int`, for helm 3.18 takes a 0 that was read from a file for a value. */}}
{{- define "torchere.httpPort" -}}
{{- default (include "torchere.effective" . | fromYaml).ports.http (int .Values.service.httpPort) -}}
{{- end -}}

{{- define "torchere.grpcPort" -}}
{{- default (include "torchere.effective" . | fromYaml).ports.grpc (int .Values.service.grpcPort) -}}
{{- end -}}

{{/* True where no pod at all is no trouble: scaled to zero. */}}
{{- define "torchere.mayHaveNoPods" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- if or (and .Values.keda.enabled (eq (int .Values.keda.minReplicas) 0)) (and (not .Values.keda.enabled) (not .Values.autoscaling.enabled) (eq (int $v.replicas) 0)) -}}true{{- end -}}
{{- end -}}

{{/* The expression of a rule with the thresholds of the values, about this namespace alone, for others have their own rules. */}}
{{- define "torchere.expression" -}}
{{- $namespace := printf "namespace=%q" .root.Release.Namespace -}}
{{- $values := .root.Values.prometheusRule -}}
{{- $expr := .rule.expr | replace "p99_5m > 1" (printf "p99_5m > %v" $values.latencyThresholdSeconds) -}}
{{- $expr = regexReplaceAll "(torchere:failures:[a-z0-9]+) > 5" $expr (printf "${1} > %v" $values.minFailures) -}}
{{- $expr = replace `job="torchere"` (printf `job="torchere", %s` $namespace) $expr -}}
{{- regexReplaceAll "torchere:[a-z0-9_]+:[a-z0-9_]+" $expr (printf "${0}{%s}" $namespace) -}}
{{- end -}}
