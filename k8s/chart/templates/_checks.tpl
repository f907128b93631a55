{{/* What a schema can't say: values that need or exclude each other. Each message says what to do. */}}
{{- define "torchere.checks" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- if regexMatch "(^|/)pytorch/torchserve(-nightly)?(:|@|$)" (.Values.torchserve_image | default "") -}}
{{- fail "torchserve_image names TorchServe's own image, which this chart can't run: it has no /livez and /readyz. Remove torchserve_image, and set image.repository and image.tag to an image of torchere." -}}
{{- end -}}
{{- if and .Values.namespace (ne .Values.namespace .Release.Namespace) (ne .Values.namespace "torchserve") -}}
{{- fail (printf "namespace: %s has no effect, neither here nor in TorchServe's chart: install with --namespace %s, and remove the value." .Values.namespace .Values.namespace) -}}
{{- end -}}
{{- range list "app.kubernetes.io/name" "app.kubernetes.io/instance" -}}
{{- if hasKey $.Values.podLabels . -}}
{{- fail (printf "podLabels.%s: by this label the Deployment and the Services find their pods. Use nameOverride, or a label of your own." .) -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.image.tag "latest" -}}
{{- fail "image.tag latest: what runs would change with no change here, and no roll-back could undo it. Set a version or image.digest." -}}
{{- end -}}
{{- if and .Values.service.headless (ne .Values.service.type "ClusterIP") -}}
{{- fail (printf "service.headless and service.type %s exclude each other: a headless Service has no address to balance on." .Values.service.type) -}}
{{- end -}}
{{- if regexMatch "(_total|_microseconds|_count|_sum|_bucket|^Requests[245]XX)$" .Values.autoscaling.metric -}}
{{- fail (printf "autoscaling.metric %s is a counter: it never goes down, so replicas never would. Use a gauge, like torchere_saturation." .Values.autoscaling.metric) -}}
{{- end -}}
{{- if and .Values.keda.enabled (eq (int .Values.keda.minReplicas) 0) (not .Values.keda.extraTriggers) -}}
{{- fail "keda.minReplicas 0 needs keda.extraTriggers: where no server runs, no request waits in a queue, so nothing would ever start one. Count requests in front of the servers, or set minReplicas to 1." -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled .Values.keda.enabled -}}
{{- fail "autoscaling.enabled and keda.enabled: two autoscalers would fight over one Deployment; enable one." -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas is %v, more than maxReplicas, %v." .Values.autoscaling.minReplicas .Values.autoscaling.maxReplicas) -}}
{{- end -}}
{{- if and .Values.keda.enabled (gt (int .Values.keda.minReplicas) (int .Values.keda.maxReplicas)) -}}
{{- fail (printf "keda.minReplicas is %v, more than maxReplicas, %v." .Values.keda.minReplicas .Values.keda.maxReplicas) -}}
{{- end -}}
{{- $many := or .Values.autoscaling.enabled .Values.keda.enabled (gt (int $v.replicas) 1) -}}
{{- if and .Values.auth.enabled $many (not .Values.auth.secretName) -}}
{{- fail "auth.enabled without auth.secretName: every server makes its own tokens, so a client's token would fit one pod of many. Set auth.secretName to a Secret with the keys, or replicaCount to 1 without autoscaling." -}}
{{- end -}}
{{- if and .Values.auth.secretName (not .Values.auth.enabled) -}}
{{- fail "auth.secretName has no effect without auth.enabled: everybody would pass. Set auth.enabled, or remove the name." -}}
{{- end -}}
{{- if and .Values.management.enabled (ne $v.configFrom "volume") (not .Values.auth.enabled) (not .Values.management.insecure) -}}
{{- fail "management.enabled needs auth.enabled: without tokens the server does not start with management beyond loopback. Set auth.enabled and auth.secretName, or management.insecure to let every client that reaches the port change models." -}}
{{- end -}}
{{- if and .Values.management.modelApi (not .Values.management.enabled) -}}
{{- fail "management.modelApi needs management.enabled; without it nobody could call the model API." -}}
{{- end -}}
{{- if and .Values.management.modelApi $many -}}
{{- fail "management.modelApi: a registration reaches one pod of many, and is gone with it. List the archives in models instead, or set replicaCount to 1 without autoscaling." -}}
{{- end -}}
{{- if and .Values.tls.enabled (not .Values.tls.secretName) -}}
{{- fail "tls.enabled needs tls.secretName: a Secret of type kubernetes.io/tls." -}}
{{- end -}}
{{- $store := $v.storeType -}}
{{- if and (eq $store "pvc") (not $v.claimName) -}}
{{- fail "modelStore.type pvc needs modelStore.pvc.claimName: an existing PersistentVolumeClaim." -}}
{{- end -}}
{{- if and (eq $store "image") (not .Values.modelStore.image.reference) -}}
{{- fail "modelStore.type image needs modelStore.image.reference: an OCI image with the archives." -}}
{{- end -}}
{{- if and (eq $store "image") (not (semverCompare ">=1.33.0-0" .Capabilities.KubeVersion.Version)) -}}
{{- fail (printf "modelStore.type image needs image volumes: Kubernetes 1.33 or later, found %s. Use modelStore.type init or pvc." .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and (eq $store "s3") (not .Values.modelStore.s3.uri) -}}
{{- fail "modelStore.type s3 needs modelStore.s3.uri: s3://bucket/prefix." -}}
{{- end -}}
{{- if and (eq $store "init") (not .Values.modelStore.init.image) -}}
{{- fail "modelStore.type init needs modelStore.init.image: a container that writes archives into $MODEL_STORE." -}}
{{- end -}}
{{- if and (eq $v.configFrom "volume") (ne $store "pvc") -}}
{{- fail "server.configFrom volume reads config/config.properties of a claim: it needs modelStore.type pvc." -}}
{{- end -}}
{{- if and (eq $v.configFrom "volume") (or .Values.models .Values.server.properties .Values.tls.enabled .Values.auth.enabled .Values.management.modelApi) -}}
{{- fail "server.configFrom volume (implied by persistentVolume.name): the claim's config.properties says everything, so models, server.properties, tls, auth and management.modelApi must stay unset. Or use modelStore.pvc.claimName with server.configFrom chart." -}}
{{- end -}}
{{- end -}}
