{{/* What a schema can't say: values that need or exclude each other. Each message says what to do. */}}
{{- define "torchere.checks" -}}
{{- $v := include "torchere.effective" . | fromYaml -}}
{{- $name := include "torchere.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "the release name %s gives the Service the name %s, which Kubernetes refuses: it has to begin with a letter, and has lower-case letters, digits and hyphens only. Set fullnameOverride, or name the release otherwise." .Release.Name $name) -}}
{{- end -}}
{{- if and (hasKey .Values "enabled") .Chart.IsRoot -}}
{{- fail "enabled has no effect here: it is for the condition of a chart that has this one among its dependencies. Remove the value." -}}
{{- end -}}
{{- if regexMatch "(^|/)pytorch/torchserve(-nightly)?(:|@|$)" (.Values.torchserve_image | default "") -}}
{{- fail "torchserve_image names TorchServe's own image, which this chart can't run: it has no /livez and /readyz. Remove torchserve_image, and set image.repository and image.tag to an image of torchere." -}}
{{- end -}}
{{- if and .Values.namespace (ne .Values.namespace .Release.Namespace) (ne .Values.namespace "torchserve") -}}
{{- fail (printf "namespace: %s has no effect, neither here nor in TorchServe's chart: install with --namespace %s, and remove the value." .Values.namespace .Values.namespace) -}}
{{- end -}}
{{- range list "app.kubernetes.io/name" "app.kubernetes.io/instance" -}}
{{- if hasKey ($.Values.podLabels | default dict) . -}}
{{- fail (printf "podLabels.%s: by this label the Deployment and the Services find their pods. Use nameOverride, or a label of your own." .) -}}
{{- end -}}
{{- end -}}
{{- if regexMatch "[:@]" (base .Values.image.repository) -}}
{{- fail (printf "image.repository %s has a tag or a digest in it, and the chart adds its own: set image.tag or image.digest, and the repository without." .Values.image.repository) -}}
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
{{- $a := .Values.autoscaling -}}
{{- $target := include "torchere.quantity" $a.averageValue | float64 -}}
{{- if le $target 0.0 -}}
{{- fail "autoscaling.averageValue is 0: Kubernetes refuses a target that is not above 0. Set more, like 700m." -}}
{{- end -}}
{{- if and (eq $a.metric "torchere_saturation") (ge $target 2.0) -}}
{{- fail (printf "autoscaling.averageValue is %s, and torchere_saturation 2 at most, when requests are refused: no pod would ever be added. Set less, like 700m." $a.averageValue) -}}
{{- end -}}
{{- if le (float64 .Values.keda.saturationThreshold) 0.0 -}}
{{- fail "keda.saturationThreshold is 0: Kubernetes refuses a target that is not above 0. Set more, like \"0.7\"." -}}
{{- end -}}
{{- if ge (float64 .Values.keda.saturationThreshold) 2.0 -}}
{{- fail (printf "keda.saturationThreshold is %s, and torchere_saturation 2 at most, when requests are refused: no pod would ever be added. Set less, like \"0.7\"." .Values.keda.saturationThreshold) -}}
{{- end -}}
{{- range $path, $threshold := dict "keda.latencyThresholdSeconds" .Values.keda.latencyThresholdSeconds "prometheusRule.latencyThresholdSeconds" .Values.prometheusRule.latencyThresholdSeconds -}}
{{- if ge (float64 ($threshold | default 0)) 120.0 -}}
{{- fail (printf "%s is %v, and latency is measured up to 120 s, in the last bucket of its histogram: no quantile would ever be above it. Set less." $path $threshold) -}}
{{- end -}}
{{- end -}}
{{- $alerts := list -}}
{{- range (.Files.Get "rules/torchere.yaml" | fromYaml).groups -}}
{{- range .rules -}}{{- with .alert -}}{{- $alerts = append $alerts . -}}{{- end -}}{{- end -}}
{{- end -}}
{{- range .Values.prometheusRule.disabled -}}
{{- if not (has . $alerts) -}}
{{- fail (printf "prometheusRule.disabled: no alert is called %s, so nothing would be left out. The names are %s." . (join ", " $alerts)) -}}
{{- end -}}
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
{{- $lws := .Values.leaderWorkerSet -}}
{{- if and $lws.enabled (not $lws.secretName) -}}
{{- fail "leaderWorkerSet.enabled needs leaderWorkerSet.secretName: a Secret with the text that the pods of a group prove to each other." -}}
{{- end -}}
{{- if and $lws.enabled (or .Values.autoscaling.enabled .Values.keda.enabled) -}}
{{- fail "leaderWorkerSet.enabled: autoscaling and keda scale the Deployment, and there is none then. Set replicaCount." -}}
{{- end -}}
{{- if and $lws.enabled (eq $v.configFrom "volume") -}}
{{- fail "leaderWorkerSet.enabled needs server.configFrom chart: the pods of a group read rendezvous_* from the chart's configuration." -}}
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
{{- if and (eq $store "gcs") (not .Values.modelStore.gcs.uri) -}}
{{- fail "modelStore.type gcs needs modelStore.gcs.uri: gs://bucket/prefix." -}}
{{- end -}}
{{- if and (eq $store "azure") (not .Values.modelStore.azure.uri) -}}
{{- fail "modelStore.type azure needs modelStore.azure.uri: https://ACCOUNT.blob.core.windows.net/container/prefix." -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.enabled needs ingress.hosts: - {host: models.example}." -}}
{{- end -}}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) -}}
{{- fail "httpRoute.enabled needs httpRoute.parentRefs: - {name: gateway, namespace: gateways}." -}}
{{- end -}}
{{- $served := add (ceil .Values.server.drainDelaySeconds) (ceil .Values.server.drainTimeoutSeconds) -}}
{{- if and (int .Values.terminationGracePeriodSeconds) (le (int .Values.terminationGracePeriodSeconds) (int $served)) -}}
{{- fail (printf "terminationGracePeriodSeconds is %v: the pod would be killed while it drains, for server.drainDelaySeconds and drainTimeoutSeconds are %v s together. Set more, or leave it 0." .Values.terminationGracePeriodSeconds $served) -}}
{{- end -}}
{{- $scrapes := .Values.serviceMonitor -}}
{{- if and $scrapes.scrapeTimeout (gt (include "torchere.milliseconds" $scrapes.scrapeTimeout | int) (include "torchere.milliseconds" $scrapes.interval | int)) -}}
{{- fail (printf "serviceMonitor.scrapeTimeout is %s, longer than the interval, %s: Prometheus would refuse its whole configuration." $scrapes.scrapeTimeout $scrapes.interval) -}}
{{- end -}}
{{- if and (or (has "IPv6" .Values.service.ipFamilies) (hasSuffix "DualStack" (.Values.service.ipFamilyPolicy | default ""))) (not (contains ":" .Values.server.address)) -}}
{{- fail (printf "service.ipFamilies and ipFamilyPolicy give clients IPv6 addresses, but server.address %s listens on IPv4 alone: set it to \"[::]\", which takes both." .Values.server.address) -}}
{{- end -}}
{{- include "torchere.conflicts" . -}}
{{- include "torchere.unread" . -}}
{{- end -}}

{{/* A duration of the schema's form, 15s, in milliseconds. */}}
{{- define "torchere.milliseconds" -}}
{{- $number := regexFind "^[0-9]+" . | int -}}
{{- mul $number (get (dict "ms" 1 "s" 1000 "m" 60000) (regexFind "[a-z]+$" .)) -}}
{{- end -}}
